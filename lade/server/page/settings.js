// The drawer with what a request may ask.

import { byId, element } from "./dom.js";
import { keep, setting } from "./store.js";

const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any", hint: "0: greedy" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top-k", min: 0, step: 1 },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 3, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "empty: a new one" },
];
const LENGTH = { name: "max_tokens", label: "Longest answer", min: 1, step: 1, hint: "in tokens" };
const CHOICES = [
  { name: "lookahead", label: "Lookahead", options: { auto: "automatic", off: "off: one token a pass", budget: "tokens fed in each pass" } },
  { name: "thinking", label: "Reasoning", options: { auto: "as the model does", on: "on", off: "off" } },
];
const BUDGET = { name: "budget", label: "Tokens fed in each pass", min: 2, max: 256, step: 1 };
const STOP = { name: "stop", label: "Stop at" };

/** The form's fields, filled with what was set before. */
export class Settings {
  constructor() {
    this.values = setting("settings", {});
    byId("sampling").append(...SAMPLING.map((field) => this.#number(field)));
    byId("decoding").append(this.#number(LENGTH), this.#text(STOP), this.#choice(CHOICES[0]), this.#number(BUDGET), this.#choice(CHOICES[1]));
    byId("reset").addEventListener("click", () => this.#reset());
    byId("fields").addEventListener("submit", (event) => event.preventDefault());
    this.#hide();
  }

  /** What goes into a request: only what was set. */
  get fields() {
    const { lookahead, budget, thinking, stop, ...numbers } = this.values;
    return {
      ...numbers,
      ...(stop && { stop: stop.split("\n").filter(Boolean) }),
      ...(lookahead === "off" && { lookahead: null }),
      ...(lookahead === "budget" && { lookahead: { budget: budget ?? 16 } }),
      ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
    };
  }

  #number({ name, label, hint, ...bounds }) {
    const input = element("input", { type: "number", id: `set-${name}`, inputmode: "decimal", ...bounds });
    input.value = this.values[name] ?? "";
    input.addEventListener("change", () => {
      const right = input.checkValidity();
      input.setAttribute("aria-invalid", !right);
      this.#set(name, input.value === "" || !right ? undefined : Number(input.value));
    });
    return this.#field(name, label, hint, input);
  }

  #text({ name, label }) {
    const input = element("textarea", { id: `set-${name}`, rows: "1", placeholder: "Nothing" });
    input.value = this.values[name] ?? "";
    input.addEventListener("change", () => this.#set(name, input.value || undefined));
    return this.#field(name, label, "one text a line", input);
  }

  #choice({ name, label, options }) {
    const items = Object.entries(options).map(([value, text]) => element("option", { value }, text));
    const select = element("select", { id: `set-${name}` }, ...items);
    select.value = this.values[name] ?? "auto";
    select.addEventListener("change", () => this.#set(name, select.value === "auto" ? undefined : select.value));
    return this.#field(name, label, null, select);
  }

  #field(name, label, hint, input) {
    const words = element("label", { for: `set-${name}` }, label, hint ? element("small", {}, ` ${hint}`) : null);
    return element("div", { class: "field", id: `field-${name}` }, words, input);
  }

  #set(name, value) {
    if (value === undefined) delete this.values[name];
    else this.values[name] = value;
    keep("settings", this.values);
    this.#hide();
  }

  #reset() {
    this.values = {};
    keep("settings", this.values);
    for (const input of document.querySelectorAll("[id^=set-]")) input.value = input.tagName === "SELECT" ? "auto" : "";
    this.#hide();
  }

  #hide() {
    byId("field-budget").hidden = this.values.lookahead !== "budget";
  }
}
