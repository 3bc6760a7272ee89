// What this browser keeps: conversations and settings.

import { Conversation } from "./conversation.js";

const PREFIX = "lade.chat.";

/** Conversations, in `localStorage`. */
export class Store {
  /** All of them, the latest first: `{id, title, changed}`. One that cannot be read is `broken`. */
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
  return { id, title: broken ? "Cannot be read" : String(kept.title ?? ""), changed: Number(kept?.changed) || 0, broken };
}

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
