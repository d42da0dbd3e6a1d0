/** What the elements of index.html do. */

import { Answer, question } from "./answer.js";
import { ServerError, chatStream, get } from "./chat_stream.js";
import { fork, step } from "./branches.js";
import { ChatList, exported, imported, keep, keptChat, newChat } from "./chats.js";
import { button, make } from "./elements.js";
import { Library } from "./library.js";
import { Meter } from "./meter.js";
import { Models } from "./models.js";
import { Pictures, filesOf, withPictures } from "./pictures.js";
import { Settings } from "./settings.js";
import { isThere } from "./storage.js";

const at = (id) => document.getElementById(id);
const KEY = "dflash-local-key";
const RETRY_MS = 2000;
const BROKEN = "broken off";
const KEEP_MS = 1000; // between two times that an answer is kept while it comes
const PROMPTS = [
  "Write a Python function that merges two sorted lists, with a docstring and tests.",
  "Explain speculative decoding in five sentences.",
  "Make a table of five sorting algorithms: name, average time, worst time, stable or not.",
];
/** The model where none is named answers simple questions only. */
const TINY = {
  file: /^SmolLM2-135M/,
  prompts: [
    "What is the capital of France, and why is it famous?",
    "How do plants make their food?",
    "What is gravity?",
  ],
  hint: "This tiny model answers simple questions, and not always right. Try one:",
};

/** The choices of "When to draft". */
const WIDTHS = {
  served: { rows: () => undefined, choice: "" },
  auto: { rows: () => "auto", choice: "" },
  always: {
    rows: (most) => Math.min(8, most),
    choice: "drafting always, as you have chosen",
  },
  never: { rows: () => 0, choice: "drafting never, as you have chosen" },
};

const state = {
  chat: newChat(),
  elements: new Map(), // of its messages
  answer: null, // the last one
  abort: null, // of the answer that is being streamed
  maxWidth: 0,
  isKnown: false, // whether we know the properties of the chosen model
  told: "", // what `tell` showed last
};
const models = new Models(at("chooser"), at("model"));
const settings = new Settings(at("sampling"));
const pictures = new Pictures(at("attached"), tell);
const list = new ChatList(at("kept"), at("search"), { open: openChat, renamed, deleted });
const METER = ["speed", "length", "share", "rounds", "reason", "warning", "drafting"];
const meter = new Meter({
  ...Object.fromEntries(METER.map((id) => [id, at(id)])),
  drafter: at("by-drafter"),
  copies: at("copied"),
});
const library = new Library(
  {
    popover: at("library"),
    advice: at("advice"),
    search: at("find"),
    status: at("fetched"),
    bar: at("fetching"),
    cancel: at("cancel"),
    list: at("listed"),
  },
  { key: () => at("key").value, served: () => models.names, use: learn, changed: learn },
);

// The models.

/** Learn what is served, and choose the model `wanted` of it. */
async function learn(wanted) {
  let props;
  try {
    await models.learn(at("key").value, wanted);
    if (wanted) models.choose();
    props = await models.props(at("key").value);
  } catch (error) {
    say(error);
    return;
  }
  at("name").textContent = models.chosen.id;
  const served = props.default_generation_settings;
  const tiny = TINY.file.test(props.model_path);
  state.isKnown = !props.is_sleeping;
  state.maxWidth = props.max_draft_width ?? 0;
  settings.showUsual(served.params);
  at("widths").disabled = !served.speculative;
  at("attach").hidden = !props.modalities?.vision;
  showServedWidth(props.draft_width);
  if (props.is_sleeping) tell("this model is loaded with the first message to it");
  else tell(served.speculative ? "" : "this model is served without a drafter");
  at("try").textContent = tiny ? TINY.hint : "Try one:";
  at("prompts").replaceChildren(
    ...(tiny ? TINY.prompts : PROMPTS).map((text) => {
      const item = make("li");
      item.append(button(text, () => send(text)));
      return item;
    }),
  );
}

/** Draft as the server is set to, until the user decides: "auto", or a number of tokens. */
function showServedWidth(served) {
  const isFixed = served > 0;
  at("served").hidden = !isFixed;
  at("served").querySelector("span").textContent = served;
  if (served === undefined || (at("widths").dataset.chosen && (isFixed || width() !== "served")))
    return;
  chooseWidth(isFixed ? "served" : served === 0 ? "never" : "auto");
}

/** Show a line about the model in place of the line about its drafts. */
function tell(text) {
  if (text || at("reason").textContent === state.told) at("reason").textContent = text;
  state.told = text;
}

/** Show an error that belongs to no answer. */
function say(error) {
  if (error.status === 401) askForKey();
  else if (error instanceof ServerError) tell(error.message);
  else reconnect();
}

function askForKey() {
  tell("this server asks for a key");
  at("unlock").hidden = false;
  at("key-here").focus();
}

function useKey(key) {
  at("key").value = at("key-here").value = key;
  sessionStorage.setItem(KEY, key);
  at("unlock").hidden = true;
  learn();
}

/** Say that the server is gone, until it is there again. */
async function reconnect() {
  if (!at("banner").hidden && at("banner").dataset.why === "gone") return;
  banner("gone", "The server cannot be reached. What you wrote is kept; the page tries again.");
  for (;;) {
    await new Promise((then) => setTimeout(then, RETRY_MS));
    try {
      await get("health", "");
      break;
    } catch (error) {
      if (error instanceof ServerError) break; // it answers, whatever it says
    }
  }
  if (at("banner").dataset.why === "gone") at("banner").hidden = true;
  learn();
}

function banner(why, text, ...more) {
  at("banner").dataset.why = why;
  at("banner").replaceChildren(text, ...more);
  at("banner").hidden = false;
}

// Ask, stop, ask again.

function send(text, images = pictures.use()) {
  if (state.abort || !text.trim()) {
    pictures.put(images);
    return;
  }
  at("prompt").value = "";
  const { messages } = state.chat;
  if (messages.at(-1)?.role === "user") messages.pop(); // it was never answered
  const message = { role: "user", content: text, ...(images.length ? { images } : {}) };
  add(message, question(text, images, resend));
  keepChat(state.chat);
  run();
}

/** Ask again with another text, in place of a question and of all that came after it. */
function resend(element, text, images) {
  if (state.abort) return;
  const { chat, elements } = state;
  fork(chat, chat.messages.findIndex((message) => elements.get(message) === element));
  while (element.nextSibling) element.nextSibling.remove();
  element.remove();
  state.answer = null;
  send(text, images ?? []);
}

function regenerate() {
  if (state.abort || !state.answer) return;
  const { messages } = state.chat;
  if (messages.at(-1).role === "assistant") fork(state.chat, messages.length - 1);
  state.answer.element.remove();
  run();
}

/** At each message from which the chat goes on in several ways: buttons to step through them. */
function showVariants() {
  for (const shown of at("messages").querySelectorAll(".variants")) shown.remove();
  for (const [i, { at: current, tails }] of Object.entries(state.chat.branches)) {
    const message = state.chat.messages[i];
    const element = message ? state.elements.get(message) : state.answer?.element;
    if (tails.length < 2 || !element) continue;
    const go = (to) => {
      if (state.abort) return;
      step(state.chat, Number(i), to);
      keepChat(state.chat);
      openChat(state.chat);
    };
    const [before, after] = [
      button("‹", () => go(current - 1), "The version before"),
      button("›", () => go(current + 1), "The next version"),
    ];
    before.disabled = current === 0;
    after.disabled = current === tails.length - 1;
    const steps = make("span", "variants");
    steps.append(before, `${current + 1} of ${tails.length}`, after);
    (element.querySelector("footer") ?? element).prepend(steps);
  }
}

function stop() {
  state.abort?.abort();
}

function clear() {
  stop();
  state.chat = newChat();
  history.replaceState(null, "", location.pathname);
  state.elements = new Map();
  state.answer = null;
  at("messages").replaceChildren();
  at("welcome").hidden = false;
  at("clear").disabled = true;
  at("anyway").hidden = true;
  at("prompt").focus();
}

/** Add a message to the chat, and its element to the page if it is not there yet. */
function add(message, element) {
  state.chat.messages.push(message);
  state.elements.set(message, element);
  if (!element.isConnected) at("messages").append(element);
  at("welcome").hidden = true;
  at("clear").disabled = false;
}

// The chats that are kept.

function openChat({ messages, ...rest }) {
  clear();
  Object.assign(state.chat, { branches: {}, ...rest });
  showAddress();
  for (const message of messages) {
    if (message.role === "user") add(message, question(message.content, message.images, resend));
    else {
      const answer = new Answer({ regenerate, copy }, "");
      answer.restore(message);
      if (state.answer) state.answer.again.hidden = true;
      state.answer = answer;
      add(message, answer.element);
    }
  }
  showVariants();
  at("chats").hidePopover();
  at("chat").scrollTop = at("chat").scrollHeight;
}

/** The chat that the page's address names, as after a reload. */
function openAddressed() {
  const chat = keptChat(location.hash.slice(1));
  if (chat && chat.id !== state.chat.id) openChat(chat);
}

function showAddress() {
  if (location.hash.slice(1) !== state.chat.id) history.replaceState(null, "", `#${state.chat.id}`);
}

function renamed(id, title) {
  if (id === state.chat.id) state.chat.title = title;
  list.show(state.chat.id);
}

function download() {
  const link = make("a");
  link.href = URL.createObjectURL(exported());
  link.download = "dflash-local-chats.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function takeFile(file) {
  let told = "this file has no chats of this page";
  try {
    const { found, taken } = await imported(file);
    told = taken < found ? `only ${taken} of ${found} chats had room` : `chats taken: ${taken}`;
  } catch {
    // It is something else.
  }
  at("live").textContent = told;
  tell(told);
  list.show(state.chat.id);
}

function deleted({ id }) {
  if (id === state.chat.id) {
    state.chat.isDeleted = true; // an answer to it may still end
    clear();
  }
  list.show(state.chat.id);
}

function keepChat(chat) {
  if (chat.isDeleted) return;
  if (keep(chat)) {
    if (chat === state.chat) showAddress();
    if (at("banner").dataset.why === "full") at("banner").hidden = true;
    return;
  }
  if (!isThere()) {
    tell("this browser keeps nothing of this page: its chats end with the tab");
    return;
  }
  const save = button("Export all", download);
  const manage = button("Choose what to delete", () => at("chats").showPopover());
  banner("full", "This browser has no room left: this chat is not kept. ", save, manage);
}

async function run() {
  const answer = new Answer({ regenerate, copy }, WIDTHS[width()].choice);
  const abort = new AbortController();
  const { chat } = state;
  if (state.answer) state.answer.again.hidden = true;
  state.answer = answer;
  state.abort = abort;
  at("messages").append(answer.element);
  showVariants();
  busy(true);
  const messages = [...chat.messages];
  let isBroken = false;
  let keptAt = performance.now();
  const keepPart = () => {
    keptAt = performance.now();
    if (answer.content.text && state.abort === abort)
      keepChat({ ...chat, messages: [...messages, { ...answer.message, told: BROKEN }] });
  };
  addEventListener("pagehide", keepPart);
  const speech = new Speech(at("live"));
  const frame = new Frame(() => {
    answer.draw();
    meter.show(answer.tally);
    speech.follow(answer.content.text);
    follow();
    if (performance.now() - keptAt > KEEP_MS) keepPart();
  });
  at("chat").scrollTop = at("chat").scrollHeight;
  try {
    for await (const chunk of chatStream(request(), at("key").value, abort.signal)) {
      answer.add(chunk, performance.now());
      frame.ask();
    }
  } catch (error) {
    isBroken = !abort.signal.aborted;
    if (isBroken) fail(answer, error);
  } finally {
    frame.now();
    removeEventListener("pagehide", keepPart);
    answer.end(abort.signal.aborted ? "stopped" : isBroken ? BROKEN : undefined);
    const text = answer.content.text;
    speech.end(text);
    if (text && !chat.isDeleted) {
      const message = answer.message;
      chat.messages.push(message);
      state.elements.set(message, answer.element);
      keepChat(chat);
    }
    state.abort = null;
    busy(false);
    showVariants();
    offerDrafts(answer);
    if (!state.isKnown) learn();
  }
}

function fail(answer, error) {
  const known = error instanceof ServerError;
  answer.fail(known ? error.message : "the server cannot be reached; is it still running?");
  if (error.status === 401) askForKey();
  else if (!known) reconnect();
}

function request() {
  const said = state.chat.messages.map(({ role, content, images }) => ({
    role,
    content: withPictures(content, images),
  }));
  return {
    ...settings.fields,
    model: models.field,
    messages: [...settings.messages, ...said],
    draft_width: state.maxWidth ? WIDTHS[width()].rows(state.maxWidth) : undefined,
  };
}

function width() {
  return document.querySelector("input[name=width]:checked").value;
}

function chooseWidth(name) {
  document.querySelector(`input[name=width][value=${name}]`).checked = true;
}

function busy(is) {
  // A button that disappears must not take the focus with it.
  const held = [at("stop"), at("send")].includes(document.activeElement);
  at("send").hidden = is;
  at("stop").hidden = !is;
  at("messages").classList.toggle("busy", is);
  if (held || document.activeElement === document.body) at("prompt").focus();
}

/** Where drafts do not pay, a new user would never see any: offer to draft anyway. */
function offerDrafts(answer) {
  const off = answer.tally.drafting?.startsWith("drafting is off");
  at("anyway").hidden = !(off && width() === "auto" && state.maxWidth > 1);
}

// While an answer is streamed.

/**
 * Draws at most once a frame, and at most a third of the time, so that the page answers its user
 * however long the text is; `now` draws at once.
 */
class Frame {
  constructor(draw) {
    this.draw = draw;
    this.asked = 0;
    this.next = 0;
  }

  ask() {
    this.asked ||= requestAnimationFrame((time) => {
      this.asked = 0;
      if (time < this.next) this.ask();
      else this.now();
    });
  }

  now() {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
    const begin = performance.now();
    this.draw();
    const end = performance.now();
    this.next = end + 2 * (end - begin);
  }
}

/** Gives an answer to screen readers by paragraphs: every single token would be too much. */
class Speech {
  constructor(element) {
    this.element = element;
    this.said = 0;
  }

  follow(text) {
    const end = text.lastIndexOf("\n\n");
    if (end > this.said) this.#say(text, end);
  }

  end(text) {
    if (text.length > this.said) this.#say(text, text.length);
  }

  #say(text, end) {
    this.element.textContent = text.slice(this.said, end).trim();
    this.said = end;
  }
}

let atEnd = true;
function follow() {
  if (atEnd) at("chat").scrollTop = at("chat").scrollHeight;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer the clipboard only to pages from this machine, or over TLS.
    const field = make("textarea", "hidden", text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  at("live").textContent = "Copied";
}

// Events.

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(at("prompt").value);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(at("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
document.addEventListener("click", async (event) => {
  const pressed = event.target.closest("button[data-copies]");
  if (!pressed) return;
  const from = pressed.dataset.copies;
  const source = from === "code" ? pressed.closest(".code").querySelector("code") : at(from);
  await copy(source.textContent);
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
});
at("attach").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", ({ target }) => {
  pictures.take([...target.files]);
  target.value = "";
});
document.addEventListener("paste", (event) => {
  const files = filesOf(event.clipboardData);
  if (at("attach").hidden || !files.length) return;
  event.preventDefault();
  pictures.take(files);
});
document.addEventListener("dragover", (event) => {
  if (!at("attach").hidden) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (at("attach").hidden || !event.dataTransfer.files.length) return; // a text goes to its field
  event.preventDefault();
  pictures.take(filesOf(event.dataTransfer));
});
at("stop").addEventListener("click", stop);
at("clear").addEventListener("click", clear);
at("anyway").addEventListener("click", () => {
  chooseWidth("always");
  at("widths").dataset.chosen = "always";
  regenerate();
  at("anyway").hidden = true;
});
at("chat").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = at("chat");
  atEnd = scrollHeight - scrollTop - clientHeight < 48;
});
at("key").value = sessionStorage.getItem(KEY) ?? "";
at("key").addEventListener("change", () => useKey(at("key").value));
at("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key-here").value);
});
at("export").addEventListener("click", download);
at("import").addEventListener("change", ({ target }) => {
  if (target.files[0]) takeFile(target.files[0]);
  target.value = "";
});
addEventListener("hashchange", openAddressed);
at("chooser").addEventListener("change", () => {
  models.choose();
  learn();
});
at("widths").addEventListener("change", () => {
  at("widths").dataset.chosen = width();
});
at("library").addEventListener("beforetoggle", ({ newState }) => {
  if (newState === "open") library.show();
});
at("chats").addEventListener("beforetoggle", ({ newState }) => {
  if (newState === "open") list.show(state.chat.id);
});
at("url").textContent = new URL("v1", location.href).href;
const wide = matchMedia("(min-width: 56rem)").matches;
at("settings").open = at("connection").open = at("drafting").open = wide;
openAddressed();
learn();
