/** What the elements of index.html do. */

import { Answer, question } from "./answer.js";
import { ServerError, chatStream } from "./chat_stream.js";
import { ChatList, keep, newChat } from "./chats.js";
import { button, make } from "./elements.js";
import { Meter } from "./meter.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";

const at = (id) => document.getElementById(id);
const KEY = "dflash-local-key";
const PROMPTS = [
  "Write a Python function that merges two sorted lists, with a docstring and tests.",
  "Explain speculative decoding in five sentences.",
  "Make a table of five sorting algorithms: name, average time, worst time, stable or not.",
];
/** The shipped pair writes nothing but Python functions. */
const TINY = {
  file: /^tiny-coder/,
  prompts: [
    "Implement `read_json` in Python: Read a JSON file and return its contents.",
    "Implement `word_count` in Python: Count how often each word occurs in a text.",
    "Write a Python function `flatten`. Flatten a list of lists into a single list.",
  ],
  hint: "This tiny model writes Python functions, and not always good ones. Try one:",
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
const list = new ChatList(at("kept"), { open: openChat, deleted });
const meter = new Meter(
  Object.fromEntries(
    ["speed", "length", "share", "rounds", "reason", "warning"].map((id) => [id, at(id)]),
  ),
);

// The models.

async function learn() {
  let props;
  try {
    await models.learn(at("key").value);
    if (models.isLoaded) props = await models.props(at("key").value);
  } catch (error) {
    say(error);
    return;
  }
  at("name").textContent = models.chosen.id;
  const served = props?.default_generation_settings;
  const tiny = TINY.file.test(props?.model_path ?? models.chosen.id);
  state.isKnown = Boolean(props);
  state.maxWidth = props?.max_draft_width ?? 0;
  settings.showUsual(served?.params);
  at("widths").disabled = !served?.speculative;
  showServedWidth(props?.draft_width);
  if (!props) tell("this model is loaded with the first message to it");
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
  tell(error.message);
  if (error.status === 401) askForKey();
}

function askForKey() {
  at("connection").open = true;
  at("key").focus();
}

// Ask, stop, ask again.

function send(text) {
  if (state.abort || !text.trim()) return;
  at("prompt").value = "";
  const { messages } = state.chat;
  if (messages.at(-1)?.role === "user") messages.pop(); // it was never answered
  add({ role: "user", content: text }, question(text, resend));
  keepChat(state.chat);
  run();
}

/** Ask again with another text, in place of a question and of all that came after it. */
function resend(element, text) {
  if (state.abort) return;
  while (element.nextSibling) element.nextSibling.remove();
  element.remove();
  const { chat, elements } = state;
  chat.messages = chat.messages.filter((message) => elements.get(message).isConnected);
  state.answer = null;
  send(text);
}

function regenerate() {
  if (state.abort || !state.answer) return;
  const { messages } = state.chat;
  if (messages.at(-1).role === "assistant") messages.pop();
  state.answer.element.remove();
  run();
}

function stop() {
  state.abort?.abort();
}

function clear() {
  stop();
  state.chat = newChat();
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

function openChat({ id, messages }) {
  clear();
  state.chat.id = id;
  for (const message of messages) {
    if (message.role === "user") add(message, question(message.content, resend));
    else {
      const answer = new Answer({ regenerate, copy }, "");
      answer.restore(message);
      if (state.answer) state.answer.again.hidden = true;
      state.answer = answer;
      add(message, answer.element);
    }
  }
  at("chats").hidePopover();
  at("chat").scrollTop = at("chat").scrollHeight;
}

function deleted({ id }) {
  if (id === state.chat.id) {
    state.chat.isDeleted = true; // an answer to it may still end
    clear();
  }
  list.show(state.chat.id);
}

function keepChat(chat) {
  if (!keep(chat)) tell("this browser has no room to keep this chat");
}

async function run() {
  const answer = new Answer({ regenerate, copy }, WIDTHS[width()].choice);
  const abort = new AbortController();
  const { chat } = state;
  if (state.answer) state.answer.again.hidden = true;
  state.answer = answer;
  state.abort = abort;
  at("messages").append(answer.element);
  busy(true);
  const speech = new Speech(at("live"));
  const frame = new Frame(() => {
    answer.draw();
    meter.show(answer.tally);
    speech.follow(answer.content.text);
    follow();
  });
  at("chat").scrollTop = at("chat").scrollHeight;
  try {
    for await (const chunk of chatStream(request(), at("key").value, abort.signal)) {
      answer.add(chunk, performance.now());
      frame.ask();
    }
  } catch (error) {
    if (!abort.signal.aborted) fail(answer, error);
  } finally {
    frame.now();
    answer.end(abort.signal.aborted ? "stopped" : undefined);
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
    offerDrafts(answer);
    if (!state.isKnown) learn();
  }
}

function fail(answer, error) {
  const known = error instanceof ServerError;
  answer.fail(known ? error.message : "the server cannot be reached; is it still running?");
  if (error.status === 401) askForKey();
}

function request() {
  const said = state.chat.messages.map(({ role, content }) => ({ role, content }));
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
at("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, at("key").value);
  learn();
});
at("chooser").addEventListener("change", () => {
  models.choose();
  learn();
});
at("widths").addEventListener("change", () => {
  at("widths").dataset.chosen = width();
});
at("chats").addEventListener("beforetoggle", ({ newState }) => {
  if (newState === "open") list.show(state.chat.id);
});
at("url").textContent = new URL("v1", location.href).href;
const wide = matchMedia("(min-width: 56rem)").matches;
at("settings").open = at("connection").open = wide;
learn();
