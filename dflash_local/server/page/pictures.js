/** Pictures that go with the next message: chosen, pasted or dropped. */

import { button, make } from "./elements.js";

const MOST_SIDE = 2048; // more than models see, and little enough to be kept

export class Pictures {
  /** `element` lists them; `refused` is called with a line about a file that is no picture. */
  constructor(element, refused) {
    this.element = element;
    this.refused = refused;
    this.put([]);
  }

  /** Show these, as data URIs, with the next message. */
  put(urls) {
    this.urls = urls;
    const items = urls.map((url, i) => {
      const item = make("li");
      const remove = button("×", () => this.put(this.urls.filter((_, j) => j !== i)));
      remove.setAttribute("aria-label", `Remove picture ${i + 1}`);
      item.append(shown(url, i), remove);
      return item;
    });
    this.element.replaceChildren(...items);
    this.element.hidden = !urls.length;
  }

  async take(files) {
    for (const file of files) {
      try {
        const url = await asUri(file); // meanwhile others may come and go
        this.put([...this.urls, url]);
      } catch {
        this.refused(`${file.name || "this"} is no picture that this browser can read`);
      }
    }
  }

  /** Those of the message that is sent now. */
  use() {
    const { urls } = this;
    this.put([]);
    return urls;
  }
}

/** The element of a picture. */
export function shown(url, i) {
  const picture = make("img");
  picture.src = url;
  picture.alt = `Picture ${i + 1}`;
  return picture;
}

/** A message's content for the API. */
export function withPictures(text, urls) {
  if (!urls?.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...parts, { type: "text", text }];
}

/** The pictures among what is dragged or pasted. */
export function filesOf(transfer) {
  return [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
}

async function asUri(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // where a picture is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
