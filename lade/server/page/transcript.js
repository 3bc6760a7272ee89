// The conversation as it is seen.

import { byId, counted, element } from "./dom.js";
import { Answer, Question } from "./message.js";
import { colour, SOURCES } from "./sources.js";

const NEAR_END_PX = 80;
const ROUNDING_PX = 2; // between where it was scrolled to and where it says that it is
const FRAME_SHARE = 3; // of the time at most a third goes into drawing
const CHAT = ["Write a Python function that merges two sorted lists.", "Why is the sky blue? Three sentences.", "List the planets in a table, with their moons."];
const TEXT = ["def binary_search(values, target):\n", "class Stack:\n", "import json\n\n\ndef load(path):\n"];

export class Transcript {
  /** @param app what messages ask to be done, and `{suggest(text), remove(id)}` */
  constructor(app) {
    this.app = app;
    this.scroller = byId("transcript");
    this.list = byId("messages");
    this.views = new Map();
    this.due = new Set();
    this.follows = true;
    this.top = 0; // where it was scrolled to
    this.scroller.addEventListener("scroll", () => this.#scrolled());
    const sized = new ResizeObserver(() => this.follows && this.follow());
    for (const node of [this.list, this.scroller]) sized.observe(node);
    byId("latest").addEventListener("click", () => this.follow());
    for (const kind of ["mouseover", "mouseout"]) this.list.addEventListener(kind, (event) => this.#point(event));
  }

  /** Show a conversation from its end. @param server what its model is */
  show(conversation, server) {
    this.views.clear();
    const actions = this.#actions(conversation);
    const nodes = conversation.path.map((message) => this.#view(message, actions, server).node);
    this.#put(nodes.length ? nodes : [this.#welcome(server.plain)], !nodes.length);
  }

  /** Show it with another version of a message, which stays where it is seen. */
  showVersion(conversation, server, message) {
    const { scrollTop } = this.scroller;
    this.show(conversation, server);
    this.follows = false;
    this.scroller.scrollTop = scrollTop;
    this.views.get(message).node.querySelector(".versions button:enabled").focus({ preventScroll: true });
  }

  /** Show what can be done with a conversation that cannot be shown. */
  showBroken(id) {
    this.views.clear();
    this.#put([element("section", { class: "welcome", role: "alert" },
      element("h2", {}, "This conversation cannot be shown"),
      element("p", { class: "faint" }, "What the browser kept of it is damaged, or this page has a fault."),
      element("div", { class: "suggestions" },
        element("button", { type: "button", onclick: () => this.app.remove(id) }, "Delete")))], true);
  }

  #put(nodes, empty) {
    this.list.replaceChildren(...nodes);
    document.body.classList.toggle("empty", empty);
    this.#legend();
    this.follow();
  }

  #actions(conversation) {
    const { app } = this;
    return {
      edit: (message, text) => app.edit(message, text),
      again: (message) => app.again(message),
      version: (message) => app.version(message),
      versions: (message) => conversation.versions(message),
    };
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
    this.top = this.scroller.scrollTop;
    byId("latest").hidden = true;
  }

  #view(message, actions, server) {
    const view = message.role === "user" ? new Question(message, actions) : new Answer(message, actions, server);
    this.views.set(message, view);
    return view;
  }

  #draw() {
    const begun = performance.now();
    for (const message of this.due) this.views.get(message)?.update?.();
    if (this.pointed && !this.pointed.isConnected) this.#unpoint();
    this.due.clear();
    this.#legend();
    this.pause = (performance.now() - begun) * FRAME_SHARE;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX || (this.follows && scrollTop > this.top - ROUNDING_PX);
    this.top = scrollTop;
    byId("latest").hidden = this.follows;
  }

  /** The sources in this conversation. */
  #legend() {
    const traces = [...this.views.keys()].flatMap(({ trace }) => trace ?? []);
    const met = new Set(traces.flatMap((trace) => trace.counts().map(([source]) => source)));
    const items = SOURCES.filter((source) => met.has(source) && source.name !== "prefill");
    const legend = byId("legend");
    legend.hidden = !items.some(({ guessed }) => guessed);
    if (legend.childElementCount === items.length) return;
    legend.replaceChildren(...items.map((source) => element("li", { title: source.meaning, class: source.guessed ? null : "own-source" }, element("i", { class: `swatch ${colour(source)}` }), source.label)));
  }

  #welcome(plain) {
    const words = plain
      ? "This model has no chat template: it continues the text that you begin."
      : "The tokens that came together in one pass are coloured as they arrive.";
    const suggestions = (plain ? TEXT : CHAT).map((text) =>
      element("button", { type: "button", onclick: () => this.app.suggest(text) }, text.trim()));
    return element("section", { class: "welcome" }, element("h2", {}, plain ? "Begin a text" : "What would you like to read?"),
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
