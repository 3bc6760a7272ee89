// Files that are attached to a message: texts become part of it, pictures go beside it.

import { element, iconButton } from "./dom.js";

const MAX_TEXT = 2 ** 20; // bytes
const MAX_SIDE = 2048; // pixels: models make pictures smaller anyway
const AS_IT_IS = 2 ** 19; // bytes of a PNG that is not made smaller
const QUALITY = 0.9;
const PICTURE = /^image\/(?!svg)/; // an SVG is a text

/**
 * A file as it is attached: `{name, text}` or `{name, url}`.
 * @throws Error in words for whoever attached it
 */
export async function attached(file, { images }) {
  const { name } = file;
  if (PICTURE.test(file.type)) {
    if (!images) throw new Error(`${name} is a picture, and this model reads only text.`);
    return { name, url: await pictureUrl(file) };
  }
  if (file.size > MAX_TEXT) throw new Error(`${name} is larger than 1 MB: attach a part of it.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name, text };
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
  }
  throw new Error(`${name} is neither a text nor a picture that the browser can read.`);
}

/** A picture as a `data:` URL: PNG as it is where it is small, else JPEG, turned as its camera was held. */
async function pictureUrl(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that the browser can read.`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (file.type === "image/png" && scale === 1 && file.size <= AS_IT_IS) return asUrl(file);
  const canvas = element("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparent ground
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

const asUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

/** The files that go with the next message. */
export class Tray {
  /** @param node a list @param changed is called when there are others */
  constructor(node, changed) {
    this.node = node;
    this.changed = changed;
    this.files = [];
  }

  add(file) {
    this.files.push(file);
    this.#show();
  }

  /** Take all of them away. */
  take() {
    const { files } = this;
    this.files = [];
    this.#show();
    return files;
  }

  #show() {
    this.node.replaceChildren(...this.files.map((file) => element("li", {}, chip(file, file.url),
      iconButton("close", `Remove ${file.name}`, () => { this.files = this.files.filter((other) => other !== file); this.#show(); }))));
    this.node.hidden = !this.files.length;
    this.changed();
  }
}

/** A file in a few pixels: a picture, or its name with its length. @param url of a picture, where it is there already */
export function chip({ name, text }, url = null) {
  if (text === undefined) return element("img", { alt: name, title: name, src: url });
  return element("span", { class: "file", title: text.slice(0, 500) }, name, element("small", {}, ` ${size(text.length)}`));
}

const size = (characters) => (characters < 1000 ? `${characters} B` : `${(characters / 1000).toFixed(0)} kB`);
