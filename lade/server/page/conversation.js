// A conversation: a tree of messages, and the path through it that is shown.

import { isTrace, Trace } from "./trace.js";

const ROLES = ["user", "assistant"];
const KEPT = { reasoning: "string", problem: "string", code: "string", finish: "string", seconds: "number", length: "number",
  told: "object", usage: "object", plain: "boolean" }; // of a message, besides what `messageOf` looks at
const TOKENS_PER_CHARACTER = 0.3; // until an answer has told
const CHARACTERS_PER_PICTURE = 2000;

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Messages stand in the order in which they were made, each with the place of its `parent` (-1: none). Those with the same
 * parent are versions of each other: a message that was edited, an answer that was asked for again.
 */
export class Conversation {
  /**
   * @param kept what `toJSON` gave; without parents each message follows the one before it
   * @throws TypeError it is nothing of the kind
   */
  constructor({ id = newId(), title = "", changed = Date.now(), system = "", messages = [], leaf = messages.length - 1, start = 0 } = {}) {
    this.id = id;
    this.title = String(title);
    this.changed = Number(changed) || 0;
    this.system = String(system ?? "");
    this.messages = messages.map(messageOf);
    if (!Number.isInteger(leaf) || leaf < -1 || leaf >= messages.length) throw new TypeError("its last message is missing");
    this.leaf = leaf; // place of the last message that is shown
    this.start = start; // place of the first message that is sent
  }

  /** The messages that are shown. */
  get path() {
    const path = [];
    for (let place = this.leaf; place >= 0; place = this.messages[place].parent) path.push(this.messages[place]);
    return path.reverse();
  }

  /** Those of them that the model is to read: all, unless the oldest were dropped. */
  get sent() {
    const { path } = this;
    return path.slice(Math.max(0, path.indexOf(this.messages[this.start])));
  }

  /** Add a message behind the last one that is shown. */
  add(message) {
    message.parent = this.leaf;
    this.leaf = this.messages.push(message) - 1;
    this.changed = Date.now();
  }

  /** All versions of a message, itself included. */
  versions({ parent, role }) {
    return this.messages.filter((other) => other.parent === parent && other.role === role);
  }

  /** Show a version of a message, and the latest that follows it. */
  show(message) {
    const next = (place) => this.messages.findLastIndex(({ parent }) => parent === place);
    this.leaf = this.messages.indexOf(message);
    for (let place = next(this.leaf); place >= 0; place = next(place)) this.leaf = place;
  }

  /** Go back to before a message: what is added next is another version of it. One that says nothing is forgotten. */
  branchAt(message) {
    this.leaf = message.parent;
    if (!message.content && message.role === "assistant") this.#forget(this.messages.indexOf(message));
  }

  #forget(place) {
    if (this.messages.some(({ parent }) => parent === place)) return;
    this.messages.splice(place, 1);
    for (const message of this.messages) if (message.parent > place) message.parent -= 1;
    if (this.leaf > place) this.leaf -= 1;
    if (this.start > place) this.start -= 1;
  }

  /** About how many tokens the model reads with the next request: exact right after an answer without reasoning. Null: unknown. */
  get tokens() {
    return this.#rate === null ? null : Math.round(lengthOf(this.sent, this.system) * this.#rate);
  }

  /** An answer has come with its `usage`: what it and its request took. */
  measure(message) {
    message.length = lengthOf(this.sent, this.system) + (message.reasoning ?? "").length;
  }

  get #rate() {
    const last = this.path.findLast(({ usage, length }) => usage && length);
    return last ? (last.usage.prompt_tokens + last.usage.completion_tokens) / last.length : null;
  }

  /** Where the messages could begin that are sent, other than where they do: at each later question. */
  get #starts() {
    return this.sent.slice(1).filter(({ role }) => role === "user");
  }

  get canDrop() {
    return this.#starts.length > 0;
  }

  /** Send no more of the oldest messages: a turn less at least, and then as many as take half of the context. */
  dropOldest(context) {
    const { sent } = this;
    const rate = this.#rate ?? TOKENS_PER_CHARACTER;
    const fits = (message) => lengthOf(sent.slice(sent.indexOf(message)), this.system) * rate <= context / 2;
    this.start = this.messages.indexOf(this.#starts.find(fits) ?? this.#starts.at(-1));
  }

  /** As it is kept: without what only counts while an answer comes. */
  toJSON() {
    const { id, title, changed, system, leaf, start } = this;
    const messages = this.messages.map(({ running, note, trace, ...rest }) => ({ ...rest, ...(trace && { trace: trace.steps }) }));
    return { id, title, changed, system, leaf, start, messages };
  }
}

/** What a message says, with the text files that were attached to it. */
export function fullText({ content, files = [] }) {
  const texts = files.filter(({ text }) => text !== undefined).map(({ name, text }) => `${name}:\n${fenced(text)}`);
  return [...texts, ...(content ? [content] : [])].join("\n\n");
}

/** A text between fences that it does not have itself. */
function fenced(text) {
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

const lengthOf = (messages, system) => messages.reduce((sum, message) => {
  const pictures = (message.files ?? []).filter(({ picture }) => picture).length;
  return sum + fullText(message).length + pictures * CHARACTERS_PER_PICTURE;
}, system.length);

function messageOf(kept, place) {
  const { role, content, parent = place - 1, files, trace } = kept;
  const placed = Number.isInteger(parent) && parent >= -1 && parent < place;
  if (!ROLES.includes(role) || typeof content !== "string" || !placed) throw new TypeError(`message ${place + 1} cannot be read`);
  const message = { role, content, parent };
  for (const [name, kind] of Object.entries(KEPT)) if (kept[name] !== null && typeof kept[name] === kind) message[name] = kept[name];
  if (Array.isArray(files)) message.files = files.filter(isFile);
  if (role === "assistant") message.trace = new Trace(isTrace(trace) ? trace : []);
  return message;
}

const isFile = (file) => typeof file?.name === "string" && (typeof file.text === "string" || typeof file.picture === "string");
