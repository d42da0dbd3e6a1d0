/** The models that the server has, and which of them is talked to. */

import { get } from "./chat_stream.js";

const CHOSEN = "dflash-local-model";

/** Chooses among several models; of one there is nothing to choose, and it shows its name alone. */
export class Models {
  constructor(chooser, name) {
    this.chooser = chooser;
    this.name = name;
    this.entries = [];
  }

  /** Ask the server which there are. Throws ServerError. */
  async learn(key) {
    this.entries = (await get("v1/models", key)).data;
    const wanted = this.chooser.value || sessionStorage.getItem(CHOSEN);
    this.chooser.replaceChildren(...this.entries.map(option));
    if (this.entries.some((entry) => entry.id === wanted)) this.chooser.value = wanted;
    this.chooser.parentElement.hidden = !this.areSeveral;
    this.name.hidden = this.areSeveral;
    this.name.textContent = this.chosen.id;
  }

  /** Take the one that the chooser stands at. */
  choose() {
    sessionStorage.setItem(CHOSEN, this.chooser.value);
  }

  get areSeveral() {
    return this.entries.length > 1;
  }

  get chosen() {
    return this.entries[Math.max(this.chooser.selectedIndex, 0)];
  }

  /** Whether asking for what it is like would have it loaded. */
  get isLoaded() {
    return this.chosen.status.value === "loaded";
  }

  /** What requests have to say of it. */
  get field() {
    return this.areSeveral ? this.chosen.id : undefined;
  }

  /** What it is like: its context, how it drafts. Throws ServerError. */
  props(key) {
    return get(`props?model=${encodeURIComponent(this.chosen.id)}`, key);
  }
}

function option({ id, status }) {
  const element = document.createElement("option");
  element.value = id;
  element.textContent = status.value === "loaded" ? id : `${id} (not loaded)`;
  return element;
}
