// What this browser keeps: conversations, settings, and the pictures that were attached.

import { Conversation, newId } from "./conversation.js";

const PREFIX = "lade.chat.";
const DAY_MS = 24 * 3600 * 1000;

/** Conversations, in `localStorage`. */
export class Store {
  /** All of them, the latest first: `{id, title, changed, text}`. One that cannot be read is `broken`. */
  all() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map((key) => summary(key.slice(PREFIX.length), read(key))).sort((one, other) => other.changed - one.changed);
  }

  /**
   * A conversation, or null where there is none.
   * @throws TypeError what is kept is no conversation
   */
  get(id) {
    const kept = this.raw(id);
    if (kept === null) return null;
    const value = parsed(kept);
    if (!Array.isArray(value?.messages)) throw new TypeError("it has no list of messages");
    return new Conversation({ ...value, id });
  }

  /**
   * Keep a conversation.
   * @returns false where the browser's room is used up: even without the steps of older answers it does not fit
   */
  save(conversation) {
    if (write(PREFIX + conversation.id, conversation)) return true;
    for (const { id, broken } of this.all().reverse()) {
      if (broken || id === conversation.id) continue;
      const older = parsed(this.raw(id));
      for (const message of older.messages) delete message?.trace;
      write(PREFIX + id, older);
      if (write(PREFIX + conversation.id, conversation)) return true;
    }
    return false;
  }

  /** What is kept of a conversation, letter by letter, and back. */
  raw(id) {
    return localStorage.getItem(PREFIX + id);
  }

  restore(id, raw) {
    localStorage.setItem(PREFIX + id, raw);
  }

  remove(id) {
    localStorage.removeItem(PREFIX + id);
  }

  /** Call back when another tab changed a conversation. */
  watch(changed) {
    addEventListener("storage", ({ key }) => key?.startsWith(PREFIX) && changed(key.slice(PREFIX.length)));
  }
}

function summary(id, kept) {
  const broken = !Array.isArray(kept?.messages);
  const text = broken ? "" : kept.messages.map((message) => message?.content).join("\n");
  return { id, title: broken ? "Cannot be read" : String(kept.title ?? ""), changed: Number(kept?.changed) || 0, text, broken };
}

/** Pictures, as `data:` URLs in the browser's database: a few of them would fill `localStorage`. */
export class Pictures {
  #held = new Map(); // by id, those of this tab
  #opened = null;

  /** @param full is called where the database takes no more; the picture is there for this tab then */
  constructor(full) {
    this.full = full;
  }

  /** Keep a picture: for this tab at once, for later ones soon. @returns its id */
  keep(url, id = newId()) {
    this.#held.set(id, url);
    this.#ask("readwrite", (pictures) => pictures.put({ url, kept: Date.now() }, id)).catch(this.full);
    return id;
  }

  /** A picture's URL, or null where it is gone. */
  async get(id) {
    if (!this.#held.has(id)) {
      const found = await this.#ask("readonly", (pictures) => pictures.get(id)).catch(() => null);
      if (!found) return null;
      this.#held.set(id, found.url);
    }
    return this.#held.get(id);
  }

  /** Forget pictures that no text names any more; young ones stay, for another tab may be about to. */
  async sweep(texts) {
    const ids = await this.#ask("readonly", (pictures) => pictures.getAllKeys());
    for (const id of ids.filter((each) => !texts.some((text) => text.includes(each)))) {
      const { kept } = await this.#ask("readonly", (pictures) => pictures.get(id));
      if (Date.now() - kept > DAY_MS) await this.#ask("readwrite", (pictures) => pictures.delete(id));
    }
  }

  async #ask(mode, what) {
    this.#opened ??= opened();
    const transaction = (await this.#opened).transaction("pictures", mode);
    return settled(what(transaction.objectStore("pictures")));
  }
}

function opened() {
  const request = indexedDB.open("lade", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("pictures");
  return settled(request);
}

const settled = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
});

/** A setting, or what it is as long as nobody set it. */
export const setting = (name, otherwise) => read(`lade.${name}`) ?? otherwise;
export const keep = (name, value) => write(`lade.${name}`, value);

const read = (key) => parsed(localStorage.getItem(key));

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    if (error instanceof SyntaxError) return null; // not written by this page
    throw error;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    throw error;
  }
}
