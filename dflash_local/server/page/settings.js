/** How answers are made, as far as the user has set it: kept in this browser. */

import { read, write } from "./storage.js";

const KEPT = "settings";

export class Settings {
  /** `fields` holds number inputs, named as in a request, and the text of the system prompt. */
  constructor(fields) {
    this.system = fields.querySelector("textarea");
    this.inputs = [...fields.querySelectorAll("input[type=number]")];
    this.usual = {};
    const values = read(KEPT) ?? {};
    for (const field of [this.system, ...this.inputs]) {
      field.value = values[field.name] ?? "";
      field.addEventListener("change", () => this.#keep());
      if (field.value && field.closest("#more")) field.closest("#more").open = true;
    }
  }

  /** Show what holds where the user has set nothing. */
  showUsual({ n_predict, ...params }) {
    // Servers go on without a limit: the length that the model's makers advise is the page's to send.
    this.usual = n_predict > 0 ? { max_tokens: n_predict } : {};
    params = { ...params, ...this.usual };
    for (const input of this.inputs)
      input.placeholder = params[input.name] ?? input.dataset.usual ?? "";
  }

  /** The fields of a request. */
  get fields() {
    const set = this.inputs.flatMap((input) => {
      const value = input.valueAsNumber;
      if (Number.isNaN(value)) return [];
      const least = input.min === "" ? -Infinity : Number(input.min);
      const most = input.max === "" ? Infinity : Number(input.max);
      const whole = input.step === "1" ? Math.round(value) : value;
      return [[input.name, Math.min(Math.max(whole, least), most)]];
    });
    return { ...this.usual, ...Object.fromEntries(set) };
  }

  /** The messages that come before all others. */
  get messages() {
    const content = this.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  #keep() {
    const fields = [this.system, ...this.inputs].filter(({ value }) => value !== "");
    write(KEPT, Object.fromEntries(fields.map(({ name, value }) => [name, value])));
  }
}
