/** The messages in the page: the user's questions and the model's answers. */

import { button, make } from "./elements.js";
import { Source, View } from "./markdown.js";
import { Tally } from "./meter.js";
import { shown } from "./pictures.js";

/** The element of a message of the user. `resend` gets the text that it was changed to, and its images. */
export function question(text, images, resend) {
  const turn = make("div", "turn");
  const message = make("article", "question", text);
  message.setAttribute("aria-label", "You");
  if (images?.length) message.prepend(...images.map(shown));
  const edit = button("Edit", () => turn.replaceChildren(form), "Edit the message");
  edit.className = "edit";
  const form = make("form", "editor");
  const field = make("textarea");
  field.setAttribute("aria-label", "The message");
  field.rows = Math.min(text.split("\n").length + 1, 12);
  const cancel = button("Cancel", () => {
    turn.replaceChildren(edit, message);
    edit.focus();
  });
  const send = button("Send", () => {
    if (field.value.trim()) resend(turn, field.value, images);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel.click();
  });
  form.append(field, cancel, send);
  edit.addEventListener("click", () => {
    field.value = text;
    field.focus();
  });
  turn.append(edit, message);
  return turn;
}

/** An answer of the model. It grows by chunks, and is drawn once a frame. */
export class Answer {
  constructor(actions, choice) {
    this.tally = new Tally(choice);
    this.finishReason = null;
    this.content = new Source();
    this.reasoning = new Source();
    this.element = make("article", "answer");
    this.element.setAttribute("aria-label", "The model");
    this.element.setAttribute("aria-busy", "true");
    const body = make("div", "body");
    this.contentView = new View(body, this.content);
    this.body = body;
    this.status = make("span", "quiet");
    this.footer = make("footer");
    this.again = button("Regenerate", actions.regenerate);
    this.copy = button("Copy", () => actions.copy(this.content.text), "Copy the answer");
    this.footer.append(this.status, this.copy, this.again);
    this.copy.hidden = this.again.hidden = true;
    this.element.append(body, this.footer);
    this.thoughtFrom = null; // when its reasoning began and ended
    this.thoughtTo = null;
  }

  /** Take a chunk of the stream. */
  add(chunk, now) {
    this.waiting = chunk.waiting;
    if (chunk.waiting) return;
    const delta = chunk.choices[0]?.delta;
    if (delta?.reasoning_content) this.thoughtFrom ??= now;
    if (delta?.content && this.thoughtFrom !== null) this.thoughtTo ??= now;
    const detail = chunk.draft_detail ?? { rounds: [], copied: [], pieces: [] };
    this.tally.add(detail, now);
    const [choice] = chunk.choices;
    if (choice?.delta.content) this.#grow(this.content, detail.pieces, choice.delta.content);
    if (choice?.delta.reasoning_content)
      this.#grow(this.reasoning, detail.pieces, choice.delta.reasoning_content);
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    if (chunk.timings) this.tally.end(chunk.timings);
  }

  /** Show what has arrived. */
  draw() {
    if (this.reasoning.text && !this.reasoningView) {
      const details = make("details", "reasoning");
      const thoughts = make("div");
      this.summary = make("summary", "", "Reasoning");
      details.append(this.summary, thoughts);
      this.element.prepend(details);
      this.reasoningView = new View(thoughts, this.reasoning);
    }
    if (this.summary && this.seconds) this.summary.textContent = `Reasoning, ${this.seconds} s`;
    this.#showLoading();
    this.reasoningView?.update();
    this.contentView.update();
    this.status.textContent = this.waiting ?? this.tally.text;
  }

  /** How long it thought, in whole seconds; 0 if that is not known yet. */
  get seconds() {
    if (this.thoughtTo === null) return this.kept ?? 0;
    return Math.max(1, Math.round((this.thoughtTo - this.thoughtFrom) / 1000));
  }

  /** While its model is loaded, how far that is. */
  #showLoading() {
    this.element.classList.toggle("waiting", Boolean(this.waiting));
    const part = /(\d+) %$/.exec(this.waiting ?? "");
    if (!this.waiting) this.bar?.remove();
    else if (this.bar && !part) this.bar.removeAttribute("value"); // how long it takes is not known
    else if (part) {
      this.bar ??= make("progress", "loading");
      this.bar.max = 100;
      this.bar.value = Number(part[1]);
      this.bar.setAttribute("aria-label", this.waiting);
      if (!this.bar.isConnected) this.element.prepend(this.bar);
    }
  }

  /** The answer has ended. `note` says why, if it was not the model that ended it. */
  end(note) {
    this.waiting = undefined;
    this.draw();
    this.element.setAttribute("aria-busy", "false");
    this.copy.hidden = !this.content.text;
    this.again.hidden = false;
    const end = this.finishReason === "length" ? "cut off at the length limit" : note;
    this.status.textContent = [this.tally.text, end].filter(Boolean).join(" · ");
  }

  /** What is kept of it. */
  get message() {
    return {
      role: "assistant",
      content: this.content.text,
      runs: this.content.runs,
      reasoning: this.reasoning.text,
      thought: this.seconds,
      told: this.status.textContent,
    };
  }

  /** Show an answer that was kept. */
  restore({ content, runs = [], reasoning = "", told = "", thought = 0 }) {
    this.kept = thought;
    this.content.restore(content, runs);
    this.reasoning.restore(reasoning, []);
    this.end();
    this.status.textContent = told;
  }

  /** The answer failed: show why in its place. */
  fail(message) {
    const alert = make("p", "error", message);
    alert.setAttribute("role", "alert");
    this.body.after(alert);
  }

  #grow(source, pieces, text) {
    if (pieces.map((piece) => piece.text).join("") !== text) source.add(text, false);
    else for (const piece of pieces) source.add(piece.text, mark(piece));
  }
}

/** The classes of a piece's text: drafted, and by whom. */
function mark(piece) {
  return piece.from_copy ? "draft copied" : piece.from_draft && "draft";
}
