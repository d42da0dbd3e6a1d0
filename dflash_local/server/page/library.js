/** The models of the list: chosen, fetched to the server's disk, and removed from it. */

import { ServerError, get, lines, send } from "./chat_stream.js";
import { button, make } from "./elements.js";

const FITS = {
  gpu: "fits the GPU",
  experts: "fits with experts in RAM",
  cpu: "fits the memory, on the CPU",
  no: "too large",
};
const ORDER = { gpu: 0, experts: 1, cpu: 2 };

export class Library {
  /** `parts` are the page's elements. `served` gives the names of the models that are served, `use`
   * takes the one to talk to, and `changed` is called when there are others. */
  constructor(parts, { key, served, use, changed }) {
    this.parts = parts;
    Object.assign(this, { key, served, use, changed });
    this.abort = null; // of the model that is being fetched
    this.listed = null;
    parts.search.addEventListener("input", () => this.#draw());
    parts.cancel.addEventListener("click", () => this.abort?.abort());
  }

  /** Ask the server what there is. */
  async show() {
    try {
      this.listed = await get("library", this.key());
    } catch (error) {
      this.#say(told(error), true);
      return;
    }
    const { best, may_change } = this.listed;
    const advice = best ? `Best for this machine: ${best.name}, ${best.why}. ` : "";
    const locked = "This server lets other machines in, so its models are not changed from here.";
    this.parts.advice.textContent = advice + (may_change ? "" : locked);
    this.#draw();
  }

  #draw() {
    if (!this.listed) return;
    const { models, others, best } = this.listed;
    const words = this.parts.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const isHere = (model) => model.store || Object.keys(model.here).length > 0;
    const rank = (model) => {
      if (isHere(model)) return -2;
      return model.name === best?.name ? -1 : (ORDER[model.fits] ?? 3);
    };
    const shown = [...others, ...models]
      .filter((model) => words.length || !model.is_further)
      .filter(({ name, target }) => words.every((word) => `${name} ${target}`.toLowerCase().includes(word)))
      .sort((one, other) => rank(one) - rank(other));
    const rows = shown.map((model) => this.#row(model, isHere(model)));
    if (!rows.length) rows.push(make("li", "quiet", "No model has this name."));
    this.parts.list.replaceChildren(...rows);
  }

  #row(model, isHere) {
    const { name } = model;
    const row = make("li", model.fits === "no" ? "quiet" : "");
    const text = make("p");
    text.append(make("strong", "", name), make("span", "quiet", ` ${facts(model)}`));
    row.append(text);
    const isServed = this.served().includes(name);
    const mayGet = this.listed.may_change && (isHere || model.gguf);
    if (isServed) row.append(button("Use", () => this.#choose(name), `Use ${name}`));
    else if (mayGet && isHere) row.append(button("Use", () => this.#fetch(name), `Use ${name}`));
    else if (mayGet) row.append(button("Fetch", () => this.#fetch(name), `Fetch ${name}`));
    if (isHere && !model.store && this.listed.may_change) {
      const remove = button("Remove", () => this.#remove(model), `Remove ${name}`);
      remove.className = "delete";
      row.append(remove);
    }
    for (const each of row.querySelectorAll("button:not(.delete)")) each.disabled = Boolean(this.abort);
    return row;
  }

  async #choose(name) {
    await this.use(name);
    this.parts.popover.hidePopover();
  }

  /** Have the server fetch what is missing of a model, and serve it. */
  async #fetch(name) {
    if (this.abort) return;
    const abort = (this.abort = new AbortController());
    const { bar, cancel } = this.parts;
    this.#say(`Fetching ${name}`);
    cancel.hidden = false;
    this.#draw();
    let isDone = false;
    try {
      const answer = await send("POST", "api/pull", { model: name }, this.key(), abort.signal);
      for await (const { status, total, completed, error } of lines(answer.body)) {
        if (error) throw new ServerError(error);
        isDone = status === "success";
        bar.hidden = !total;
        if (total) bar.value = completed / total;
        this.#say(total ? `${name}: ${size(completed)} of ${size(total)}` : status);
      }
      if (!isDone) throw new ServerError("the connection broke off; fetch it again to go on");
      this.#say("");
    } catch (error) {
      if (!abort.signal.aborted) this.#say(`${name}: ${told(error)}`, true);
      else this.#say(`${name} is not whole yet; what has come is kept, and Fetch goes on with it.`);
    }
    this.abort = null;
    bar.hidden = cancel.hidden = true;
    await this.show();
    if (isDone) await this.#choose(name);
  }

  async #remove(model) {
    const bytes = Object.values(model.here).reduce((sum, each) => sum + each, 0);
    const question = `Remove ${model.name} and its drafter from this disk? ${size(bytes)} are freed.`;
    if (!confirm(question)) return;
    try {
      await send("DELETE", "api/delete", { model: model.name }, this.key());
      this.#say(`${model.name} is removed.`);
      await this.changed();
    } catch (error) {
      this.#say(told(error), true);
    }
    await this.show();
  }

  #say(text, isError = false) {
    this.parts.status.textContent = text;
    this.parts.status.classList.toggle("error", isError);
  }
}

/** What is known of a model besides its name. */
function facts({ target, n_bytes, is_estimate, fits, here, drafter_here, store, gguf }) {
  const quants = Object.keys(here ?? {});
  const bytes = n_bytes ? `${is_estimate ? "about " : ""}${size(n_bytes)}` : "size not known";
  const parts = [target, bytes, FITS[fits]];
  if (store) parts.push(`${store} has it`);
  else if (quants.length) parts.push(`here: ${quants.join(", ")}${drafter_here ? "" : " without drafter"}`);
  else if (!gguf) parts.push("no place of its files is known");
  return parts.filter(Boolean).join(" · ");
}

function size(bytes) {
  return bytes >= 1e8 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function told(error) {
  return error instanceof ServerError ? error.message : "the server cannot be reached";
}
