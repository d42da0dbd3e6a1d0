/** The models of the server, and the one that the user has chosen. */

import { get } from "./chat_stream.js";
import { make } from "./elements.js";

const CHOSEN = "dflash-local-model";

/** A choice among several models; if there is only one, its name is shown instead. */
export class Models {
  constructor(chooser, name) {
    this.chooser = chooser;
    this.name = name;
    this.entries = [];
  }

  /** Ask the server for its models; `wanted` is the one to choose. Throws ServerError. */
  async learn(key, wanted = this.chooser.value || sessionStorage.getItem(CHOSEN)) {
    const { data } = await get("v1/models", key);
    const writers = data.filter(({ use }) => use === "chat");
    this.entries = writers.length ? writers : data;
    this.chooser.replaceChildren(...this.entries.map(option));
    if (this.entries.some((entry) => entry.id === wanted)) this.chooser.value = wanted;
    this.chooser.parentElement.hidden = !this.areSeveral;
    this.name.hidden = this.areSeveral;
    this.name.textContent = this.chosen.id;
  }

  /** Remember the user's choice. */
  choose() {
    sessionStorage.setItem(CHOSEN, this.chooser.value);
  }

  get names() {
    return this.entries.map(({ id }) => id);
  }

  get areSeveral() {
    return this.entries.length > 1;
  }

  get chosen() {
    return this.entries[Math.max(this.chooser.selectedIndex, 0)];
  }

  /** The `model` of a request. */
  get field() {
    return this.areSeveral ? this.chosen.id : undefined;
  }

  /** The properties of the chosen model; fewer while it is not loaded. Throws ServerError. */
  props(key) {
    return get(`props?model=${encodeURIComponent(this.chosen.id)}`, key);
  }
}

function option({ id, status }) {
  const element = make("option", "", status.value === "loaded" ? id : `${id} (not loaded)`);
  element.value = id;
  return element;
}
