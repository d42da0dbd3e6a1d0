/** The chats that this browser keeps, each under a name of its own: tabs do not overwrite others. */

import { button, make } from "./elements.js";
import { names, read, remove, write } from "./storage.js";

const START = "chat-";
const TITLE_LENGTH = 80;

/** A chat without messages. */
export function newChat() {
  const id = START + crypto.getRandomValues(new Uint32Array(2)).join("-");
  return { id, messages: [], branches: {} };
}

/** Keep a chat; returns whether there was room for it. No other chat makes room. */
export function keep(chat) {
  return write(chat.id, { ...chat, time: Date.now() });
}

/** The chat of that id, if it is kept. */
export function keptChat(id) {
  const chat = id.startsWith(START) ? read(id) : undefined;
  return isChat(chat) ? chat : undefined;
}

/** The chats that are kept, the latest first. */
function kept() {
  return names(START)
    .map(read)
    .filter(isChat)
    .sort((one, other) => other.time - one.time);
}

function isChat(chat) {
  const isMessage = (message) => typeof message?.content === "string" && message.role;
  return Boolean(chat?.id) && Array.isArray(chat.messages) && chat.messages.every(isMessage);
}

/** All chats as a file to download. */
export function exported() {
  const text = JSON.stringify({ "dflash-local": 1, chats: kept() }, null, 1);
  return new Blob([text], { type: "application/json" });
}

/** Take the chats of such a file; how many there were, and how many had room. */
export async function imported(file) {
  const { chats } = JSON.parse(await file.text());
  const sound = chats.filter((chat) => isChat(chat) && chat.id.startsWith(START));
  const taken = sound.filter((chat) => write(chat.id, { branches: {}, ...chat }));
  return { found: sound.length, taken: taken.length };
}

/** What a chat is called: what its user called it, or how its first question begins. */
function titleOf(chat) {
  const first = chat.messages.find(({ role }) => role === "user")?.content ?? "";
  return chat.title || first.trim().split("\n")[0].slice(0, TITLE_LENGTH) || "Untitled";
}

/** A list of the chats, to open, to rename and to delete them. */
export class ChatList {
  constructor(element, search, { open, renamed, deleted }) {
    this.element = element;
    this.search = search;
    this.actions = { open, renamed, deleted };
    search.addEventListener("input", () => this.show(this.current));
  }

  /** Show what is kept now and has the words that are searched; `current` is the open chat's id. */
  show(current) {
    this.current = current;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (chat) => {
      const text = [titleOf(chat), ...chat.messages.map(({ content }) => content)].join("\n");
      return words.every((word) => text.toLowerCase().includes(word));
    };
    const items = kept()
      .filter(has)
      .map((chat) => this.#item(chat, chat.id === current));
    const none = words.length ? "No chat has these words." : "None yet: they are kept in this browser.";
    if (!items.length) items.push(make("li", "quiet", none));
    this.element.replaceChildren(...items);
  }

  #item(chat, isCurrent) {
    const title = titleOf(chat);
    const item = make("li");
    const open = button(title, () => this.actions.open(chat));
    open.className = "open";
    if (isCurrent) open.setAttribute("aria-current", "true");
    const rename = button("Rename", () => {
      const given = prompt("The name of this chat", title)?.trim();
      if (!given) return;
      write(chat.id, { ...chat, title: given });
      this.actions.renamed(chat.id, given);
    });
    rename.setAttribute("aria-label", `Rename the chat: ${title}`);
    const bin = button("Delete", () => {
      if (!confirm(`Delete this chat from the browser?\n\n${title}`)) return;
      remove(chat.id);
      this.actions.deleted(chat);
    });
    bin.setAttribute("aria-label", `Delete the chat: ${title}`);
    rename.className = bin.className = "delete";
    item.append(open, rename, bin);
    return item;
  }
}
