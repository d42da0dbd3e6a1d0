/** The chats that this browser keeps, each under a name of its own: tabs do not overwrite others. */

import { button, make } from "./elements.js";
import { names, read, remove, write } from "./storage.js";

const START = "chat-";
const TITLE_LENGTH = 80;

/** A chat without messages. */
export function newChat() {
  return { id: START + crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] };
}

/** Keep a chat. The oldest others make room for it, if that is enough; returns whether it is kept. */
export function keep(chat) {
  const entry = { ...chat, time: Date.now() };
  const others = kept().filter(({ id }) => id !== chat.id);
  const removed = [];
  while (!write(chat.id, entry)) {
    const oldest = others.pop();
    if (!oldest) {
      for (const other of removed) write(other.id, other);
      return false;
    }
    remove(oldest.id);
    removed.push(oldest);
  }
  return true;
}

/** The chats that are kept, the latest first. */
function kept() {
  const chats = names(START).map(read);
  const sound = chats.filter((chat) => chat?.id && Array.isArray(chat.messages));
  return sound.sort((one, other) => other.time - one.time);
}

/** A list of the chats, to open and to delete them. */
export class ChatList {
  constructor(element, { open, deleted }) {
    this.element = element;
    this.actions = { open, deleted };
  }

  /** Show what is kept now; `current` is the id of the chat that is open. */
  show(current) {
    const chats = kept();
    const items = chats.map((chat) => this.#item(chat, chat.id === current));
    if (!items.length) items.push(make("li", "quiet", "None yet: they are kept in this browser."));
    this.element.replaceChildren(...items);
  }

  #item(chat, isCurrent) {
    const first = chat.messages.find(({ role }) => role === "user")?.content ?? "";
    const title = first.trim().split("\n")[0].slice(0, TITLE_LENGTH) || "Untitled";
    const item = make("li");
    const open = button(title, () => this.actions.open(chat));
    open.className = "open";
    if (isCurrent) open.setAttribute("aria-current", "true");
    const askAndDelete = () => {
      if (!confirm(`Delete this chat from the browser?\n\n${title}`)) return;
      remove(chat.id);
      this.actions.deleted(chat);
    };
    const bin = button("Delete", askAndDelete, `Delete the chat: ${title}`);
    bin.className = "delete";
    item.append(open, bin);
    return item;
  }
}
