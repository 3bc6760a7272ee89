// How messages look.

import { copyButton, counted, element, iconButton } from "./dom.js";
import { Prose } from "./prose.js";
import { colour } from "./sources.js";
import { stepTable, Strip } from "./strip.js";

const DRAWN_OVER = 1.1; // tokens in each pass; below it, the passes are drawn for whoever asks
const LEAST_SECONDS = 0.2; // that a rate can be told from

/** What a user said: shown as it was typed, and edited in place. */
export class Question {
  /** @param actions `{edit(message, text), version(message), versions(message)}` */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = element("article", { class: "question", "aria-label": "You" });
    this.#show();
  }

  #show() {
    const { content } = this.message;
    const tools = element("div", { class: "tools" }, copyButton(() => content), iconButton("edit", "Edit", () => this.#edit()));
    this.node.replaceChildren(
      element("div", { class: "said" }, content),
      element("div", { class: "below" }, versionSwitch(this.message, this.actions), tools));
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

/** Where there are several versions of a message: which one this is, and buttons to the others. */
function versionSwitch(message, actions) {
  const versions = actions.versions(message);
  if (versions.length < 2) return null;
  const place = versions.indexOf(message);
  const step = (drawing, label, to) => {
    const button = iconButton(drawing, label, () => actions.version(versions[to]));
    button.disabled = !versions[to];
    return button;
  };
  const words = element("span", {}, `${place + 1} / ${versions.length}`);
  return element("div", { class: "versions", role: "group", "aria-label": "Versions" },
    step("left", "Previous version", place - 1), words, step("right", "Next version", place + 1));
}

/** An answer: grows while it streams. */
export class Answer {
  /** @param actions `{again(message), version(message), versions(message)}` @param server whose model it is */
  constructor(message, actions, { plain, context }) {
    this.message = message;
    this.trace = message.trace;
    this.actions = actions;
    this.plain = plain;
    this.context = context;
    this.prose = new Prose(plain || message.plain);
    this.thought = new Prose(message.plain);
    this.reasoning = element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thought.node);
    this.strip = new Strip(this.trace);
    this.figures = element("summary", {});
    this.steps = element("details", { class: "steps", hidden: true, ontoggle: () => this.#passes() }, this.figures, element("div"));
    this.problem = element("p", { class: "problem", role: "alert", hidden: true });
    this.note = element("p", { class: "note faint", hidden: true });
    this.wait = element("p", { class: "waiting" }, element("i"), element("span"));
    const tools = element("div", { class: "tools" }, copyButton(() => message.content, "Copy as Markdown"),
      iconButton("again", "Answer again", () => actions.again(message)));
    const below = element("div", { class: "below" }, versionSwitch(message, actions), tools);
    this.node = element("article", { class: "answer", "aria-label": "Answer" },
      this.reasoning, this.prose.node, this.wait, this.note, this.problem, this.strip.node, this.steps, below);
    this.update();
  }

  update() {
    const { content, reasoning = "", running, note = "" } = this.message;
    this.node.setAttribute("aria-busy", Boolean(running));
    this.reasoning.hidden = !reasoning;
    if (reasoning) this.thought.update(reasoning, this.trace.spans);
    this.reasoning.classList.toggle("going", Boolean(running && reasoning && !content));
    this.prose.update(content, this.trace.spans, reasoning.length);
    this.wait.hidden = !running || Boolean(content || reasoning);
    this.wait.lastChild.textContent = note;
    this.#notes();
    this.steps.hidden = !this.trace.steps.length;
    this.figures.textContent = figures(this.message, this.trace, this.context);
    this.strip.update();
    this.#passes();
  }

  /** What is to be said about the answer: that it failed, that it is empty, that it is not drawn as Markdown. */
  #notes() {
    const { message, prose, thought, actions } = this;
    this.problem.hidden = !message.problem;
    if (message.problem && this.problem.firstChild?.textContent !== message.problem) {
      const again = element("button", { type: "button", onclick: () => actions.again(message) }, "Try again");
      this.problem.replaceChildren(element("span", {}, message.problem), again);
    }
    const failed = !this.plain && (prose.plain || thought.plain);
    if (failed) message.plain = true; // so that it is not tried again with each reload
    const words = failed ? "Shown as plain text: it cannot be drawn as Markdown." : emptiness(message);
    this.note.hidden = !words;
    if (!words || this.note.firstChild?.textContent === words) return;
    const markdown = element("button", { type: "button", class: "quiet", onclick: () => this.#tryMarkdown() }, "Try again");
    this.note.replaceChildren(element("span", {}, words), ...(failed ? [markdown] : []));
  }

  #tryMarkdown() {
    delete this.message.plain;
    for (const prose of [this.prose, this.thought]) prose.setPlain(false);
    this.note.replaceChildren();
    this.update();
  }

  /** The strip where it shows something, and all about the passes for whoever opened the line. */
  #passes() {
    const { open } = this.steps;
    this.strip.node.hidden = !open && this.trace.tokensPerStep <= DRAWN_OVER;
    if (!open || this.message.running) return;
    const text = (this.message.reasoning ?? "") + this.message.content;
    this.steps.lastChild.replaceChildren(shares(this.trace), stepTable(this.trace, text), detail(this.message, this.trace));
  }
}

/** What an answer that says nothing is said to be; "" for others. */
function emptiness({ content, reasoning, running, problem, finish }) {
  if (running || problem || content.trim()) return "";
  if (finish === "stopped") return "Stopped before the answer began.";
  if (reasoning) return finish === "length" ? "The longest answer was reached amid the reasoning." : "The model ended behind its reasoning, without an answer.";
  return content ? "The answer is nothing but blank space." : "The model ended its answer without a word.";
}

/** One line: how much came how fast. */
function figures({ seconds, finish, running, usage }, trace, context) {
  const parts = [counted(trace.tokens, "token")];
  if (seconds >= LEAST_SECONDS && trace.tokens > 1) parts.push(`${(trace.tokens / seconds).toFixed(0)} tokens/s`);
  if (trace.tokensPerStep > DRAWN_OVER) parts.push(`${trace.tokensPerStep.toFixed(2)} tokens per pass`);
  const full = context !== null && usage?.prompt_tokens + usage?.completion_tokens >= context;
  if (finish === "length") parts.push(full ? "cut: the context is full" : "cut at the longest answer");
  if (finish === "stopped") parts.push("stopped");
  if (!finish && !running) parts.push("broken off");
  return parts.join(" · ");
}

/** How many tokens came from where. */
function shares(trace) {
  const items = trace.counts().map(([source, number]) =>
    element("li", {}, element("i", { class: `swatch ${colour(source)}` }), `${source.label} ${number}`));
  return element("ul", { class: "shares" }, ...items);
}

function detail({ told = {}, usage }, trace) {
  const parts = [`${counted(trace.decoding.length, "pass", "passes")}, ${trace.tokensPerStep.toFixed(2)} tokens in each`];
  if (told.seed !== undefined) parts.push(`seed ${told.seed}`);
  if (told.resting_steps) parts.push(`drafting rested in ${told.resting_steps} steps, as drafts had not paid`);
  if (usage) parts.push(`prompt ${counted(usage.prompt_tokens, "token")}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of them kept from before`);
  for (const [name, label] of [["queue_ms", "waited"], ["prefill_ms", "prompt read in"], ["decode_ms", "decoded in"]]) {
    if (told[name] !== undefined) parts.push(`${label} ${Math.round(told[name])} ms`);
  }
  return element("p", { class: "faint" }, parts.join(" · "));
}
