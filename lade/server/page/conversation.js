// A conversation: a tree of messages, and the path through it that is shown.

import { isTrace, Trace } from "./trace.js";

const ROLES = ["user", "assistant"];
const KEPT = { reasoning: "string", problem: "string", code: "string", finish: "string", seconds: "number",
  told: "object", usage: "object", plain: "boolean" }; // of a message, besides what `messageOf` looks at

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Messages stand in the order in which they were made, each with the place of its `parent` (-1: none). Those with the same
 * parent are versions of each other: a message that was edited, an answer that was asked for again.
 */
export class Conversation {
  /**
   * @param kept what `toJSON` gave; without parents each message follows the one before it
   * @throws TypeError it is nothing of the kind
   */
  constructor({ id = newId(), title = "", changed = Date.now(), system = "", messages = [], leaf = messages.length - 1 } = {}) {
    this.id = id;
    this.title = String(title);
    this.changed = Number(changed) || 0;
    this.system = String(system ?? "");
    this.messages = messages.map(messageOf);
    if (!Number.isInteger(leaf) || leaf < -1 || leaf >= messages.length) throw new TypeError("its last message is missing");
    this.leaf = leaf; // place of the last message that is shown
  }

  /** The messages that are shown. */
  get path() {
    const path = [];
    for (let place = this.leaf; place >= 0; place = this.messages[place].parent) path.push(this.messages[place]);
    return path.reverse();
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
  }

  /** As it is kept: without what only counts while an answer comes. */
  toJSON() {
    const { id, title, changed, system, leaf } = this;
    const messages = this.messages.map(({ running, note, trace, ...rest }) => ({ ...rest, ...(trace && { trace: trace.steps }) }));
    return { id, title, changed, system, leaf, messages };
  }
}

function messageOf(kept, place) {
  const { role, content, parent = place - 1, trace } = kept;
  const placed = Number.isInteger(parent) && parent >= -1 && parent < place;
  if (!ROLES.includes(role) || typeof content !== "string" || !placed) throw new TypeError(`message ${place + 1} cannot be read`);
  const message = { role, content, parent };
  for (const [name, kind] of Object.entries(KEPT)) if (kept[name] !== null && typeof kept[name] === kind) message[name] = kept[name];
  if (role === "assistant") message.trace = new Trace(isTrace(trace) ? trace : []);
  return message;
}
