// How messages look.

import { copyButton, counted, element, iconButton } from "./dom.js";
import { Prose } from "./prose.js";
import { colour } from "./sources.js";
import { stepTable, Strip } from "./strip.js";
import { Trace } from "./trace.js";

/** What a user said: shown as it was typed, and edited in place. */
export class Question {
  /** @param actions `{edit(message, text)}` */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = element("article", { class: "question", "aria-label": "You" });
    this.#show();
  }

  #show() {
    const tools = element("div", { class: "tools" }, copyButton(() => this.message.content),
      iconButton("edit", "Edit", () => this.#edit()));
    this.node.replaceChildren(element("div", { class: "said" }, this.message.content), tools);
  }

  #edit() {
    const field = element("textarea", { "aria-label": "Edit your message", rows: "3" });
    field.value = this.message.content;
    const send = () => this.actions.edit(this.message, field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#show();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const buttons = element("div", { class: "buttons" },
      element("button", { type: "button", onclick: () => this.#show() }, "Cancel"),
      element("button", { type: "button", class: "primary", onclick: send }, "Send"));
    this.node.replaceChildren(element("div", { class: "editor" }, field, buttons));
    field.focus();
  }
}

/** An answer: grows while it streams. */
export class Answer {
  /** @param actions `{again(message)}` */
  constructor(message, actions, { plain = false } = {}) {
    this.message = message;
    this.trace = message.trace instanceof Trace ? message.trace : (message.trace = new Trace(message.trace));
    this.prose = new Prose(plain);
    this.thought = new Prose(false);
    this.reasoning = element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thought.node);
    this.strip = new Strip(this.trace);
    this.figures = element("summary", {});
    this.steps = element("details", { class: "steps", hidden: true, ontoggle: () => this.#table() }, this.figures, element("div"));
    const retry = element("button", { type: "button", onclick: () => actions.again(message) }, "Try again");
    this.problem = element("p", { class: "problem", role: "alert", hidden: true }, element("span"), retry);
    this.wait = element("p", { class: "waiting" }, element("i"), element("span"));
    const tools = element("div", { class: "tools" }, copyButton(() => message.content),
      iconButton("again", "Answer again", () => actions.again(message)));
    this.node = element("article", { class: "answer", "aria-label": "Answer" },
      this.reasoning, this.prose.node, this.wait, this.problem, this.strip.node, this.steps, tools);
    this.update();
  }

  update() {
    const { content, reasoning = "", problem, running, note = "" } = this.message;
    this.node.setAttribute("aria-busy", Boolean(running));
    this.reasoning.hidden = !reasoning;
    if (reasoning) this.thought.update(reasoning, this.trace.spans);
    this.reasoning.classList.toggle("going", Boolean(running && reasoning && !content));
    this.prose.update(content, this.trace.spans, reasoning.length);
    this.wait.hidden = !running || Boolean(content || reasoning);
    this.wait.lastChild.textContent = note;
    this.problem.hidden = !problem;
    if (problem) this.problem.firstChild.textContent = problem;
    this.strip.update();
    this.strip.node.hidden = !this.trace.steps.length;
    this.steps.hidden = !this.trace.steps.length;
    this.figures.textContent = figures(this.message, this.trace);
    if (!running) this.#table();
  }

  #table() {
    if (!this.steps.open) return;
    const text = (this.message.reasoning ?? "") + this.message.content;
    this.steps.lastChild.replaceChildren(shares(this.trace), stepTable(this.trace, text), detail(this.message));
  }
}

/** One line: how much came how fast. */
function figures({ seconds, finish, running }, trace) {
  const parts = [];
  if (trace.decoding.length) parts.push(`${trace.tokensPerStep.toFixed(2)} tokens per pass`);
  parts.push(counted(trace.tokens, "token"), counted(trace.decoding.length, "pass", "passes"));
  if (seconds > 0 && trace.tokens > 1) parts.push(`${(trace.tokens / seconds).toFixed(0)} tokens/s`);
  if (finish === "length") parts.push("cut at the longest answer");
  if (finish === "stopped") parts.push("stopped");
  if (!finish && !running) parts.push("broken off");
  return parts.join(" · ");
}

/** How many tokens came from where. */
function shares(trace) {
  const items = trace.counts().map(([source, count]) =>
    element("li", {}, element("i", { class: `swatch ${colour(source)}` }), `${source.label} ${count}`));
  return element("ul", { class: "shares" }, ...items);
}

function detail({ told = {}, usage }) {
  const parts = [];
  if (told.seed !== undefined) parts.push(`seed ${told.seed}`);
  if (usage) parts.push(`prompt ${counted(usage.prompt_tokens, "token")}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of them kept from before`);
  for (const [name, label] of [["queue_ms", "waited"], ["prefill_ms", "prompt read in"], ["decode_ms", "decoded in"]]) {
    if (told[name] !== undefined) parts.push(`${label} ${Math.round(told[name])} ms`);
  }
  return element("p", { class: "faint" }, parts.join(" · "));
}
