// The conversation as it is seen.

import { byId, counted, element } from "./dom.js";
import { Answer, Question } from "./message.js";
import { colour, SOURCES } from "./sources.js";
import { Trace } from "./trace.js";

const NEAR_END_PX = 80;
const FRAME_SHARE = 3; // of the time at most a third goes into drawing
const CHAT = ["Write a Python function that merges two sorted lists.", "Why is the sky blue? Three sentences.", "List the planets in a table, with their moons."];
const TEXT = ["def binary_search(values, target):\n", "class Stack:\n", "import json\n\n\ndef load(path):\n"];

export class Transcript {
  /** @param actions `{edit(message, text), again(message), suggest(text)}` */
  constructor(actions) {
    this.actions = actions;
    this.scroller = byId("transcript");
    this.list = byId("messages");
    this.views = new Map();
    this.due = new Set();
    this.follows = true;
    this.scroller.addEventListener("scroll", () => this.#scrolled());
    byId("latest").addEventListener("click", () => this.follow());
    for (const kind of ["mouseover", "mouseout"]) this.list.addEventListener(kind, (event) => this.#point(event));
  }

  /** Show a conversation. */
  show(conversation, plain) {
    this.plain = plain;
    this.views.clear();
    const nodes = conversation.messages.map((message) => this.#view(message).node);
    this.list.replaceChildren(...(nodes.length ? nodes : [this.#welcome()]));
    document.body.classList.toggle("empty", !nodes.length);
    this.#legend();
    this.follow();
  }

  /** A message has changed: drawn with the next frame, and less often the longer drawing takes. */
  changed(message) {
    if (!this.views.has(message)) return; // of a conversation that is not shown
    if (!this.due.size) setTimeout(() => requestAnimationFrame(() => this.#draw()), this.pause ?? 0);
    this.due.add(message);
  }

  /** Go to the end, and stay there while the text grows. */
  follow() {
    this.follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    byId("latest").hidden = true;
  }

  #view(message) {
    const view = message.role === "user" ? new Question(message, this.actions, this) : new Answer(message, this.actions, this);
    this.views.set(message, view);
    return view;
  }

  #draw() {
    const begun = performance.now();
    for (const message of this.due) this.views.get(message)?.update?.();
    if (this.pointed && !this.pointed.isConnected) this.#unpoint();
    this.due.clear();
    this.#legend();
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.pause = (performance.now() - begun) * FRAME_SHARE;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    byId("latest").hidden = this.follows;
  }

  /** The sources in this conversation. */
  #legend() {
    const traces = [...this.views.keys()].map(({ trace }) => trace).filter((trace) => trace instanceof Trace);
    const met = new Set(traces.flatMap((trace) => trace.counts().map(([source]) => source)));
    const items = SOURCES.filter((source) => met.has(source) && source.name !== "prefill");
    const legend = byId("legend");
    legend.hidden = !items.length;
    if (legend.childElementCount === items.length) return;
    legend.replaceChildren(...items.map((source) => element("li", { title: source.meaning }, element("i", { class: `swatch ${colour(source)}` }), source.label)));
  }

  #welcome() {
    const words = this.plain
      ? "This model has no chat template: it continues the text that you begin."
      : "The tokens that came together in one pass are coloured as they arrive.";
    const suggestions = (this.plain ? TEXT : CHAT).map((text) =>
      element("button", { type: "button", onclick: () => this.actions.suggest(text) }, text.trim()));
    return element("section", { class: "welcome" }, element("h2", {}, this.plain ? "Begin a text" : "What would you like to read?"),
      element("p", { class: "faint" }, words), element("div", { class: "suggestions" }, ...suggestions));
  }

  #unpoint() {
    for (const lit of this.list.querySelectorAll(".lit")) lit.classList.remove("lit");
    byId("tip").hidden = true;
    this.pointed = null;
  }

  /** A token and its column belong together: pointing at one shows the other, and what it is. */
  #point({ type, target }) {
    const step = target.closest?.("[data-step]")?.dataset.step;
    const article = target.closest?.(".answer");
    this.#unpoint();
    if (type === "mouseout" || step === undefined || !article) return;
    for (const part of article.querySelectorAll(`[data-step="${step}"]`)) part.classList.add("lit");
    const view = [...this.views.values()].find(({ node }) => node === article);
    this.pointed = target;
    const tip = byId("tip");
    tip.textContent = words(view.trace, Number(step), target.dataset.token);
    tip.hidden = false;
    const { left, top } = target.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, top - tip.offsetHeight - 6)}px`;
  }
}

function words(trace, step, number) {
  const tokens = trace.of(step);
  const { fed, source } = tokens[0];
  if (source.name === "prefill") return "first token: reading the prompt yields it";
  const from = number === undefined ? [...new Set(tokens.map((token) => token.source.label))].join(", ") : trace.spans[number].source.label;
  return `${from} · pass ${step}: ${counted(tokens.length, "token")} out of ${fed} fed`;
}
