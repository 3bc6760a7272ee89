// The drawer with what a request may ask.

import { byId, element } from "./dom.js";
import { keep, setting } from "./store.js";

const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any", hint: "0: greedy" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top-k", min: 0, step: 1, hint: "0: off" },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 3, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any" },
  { name: "seed", label: "Seed", min: 0, step: 1 },
];
const LENGTH = { name: "max_tokens", label: "Longest answer", min: 1, step: 1, hint: "in tokens" };
const STOP = { name: "stop", label: "Stop at", hint: "one text a line", placeholder: "Nothing" };
const FORM = { name: "form", label: "Form of the answer", options: { auto: "any text", json: "JSON", schema: "JSON by a schema" } };
const SCHEMA = { name: "schema", label: "JSON schema", placeholder: '{"type": "object", ...}' };
const LOOKAHEAD = { name: "lookahead", label: "Lookahead", options: { auto: "automatic", off: "off: one token a pass", budget: "tokens fed in each pass" } };
const BUDGET = { name: "budget", label: "Tokens fed in each pass", min: 2, max: 256, step: 1, placeholder: "16" };
const THINKING = { name: "thinking", label: "Reasoning", options: { auto: "as the model does", on: "on", off: "off" } };
const UNSET = { presence_penalty: 0, frequency_penalty: 0, min_p: 0, repetition_penalty: 1, seed: "random" }; // where the server does not say

/** The form's fields, filled with what was set before. */
export class Settings {
  constructor() {
    this.values = setting("settings", {});
    this.page = {};
    byId("sampling").append(...SAMPLING.map((field) => this.#number(field)));
    byId("answering").append(this.#number(LENGTH), this.#text(STOP), this.#choice(FORM), this.#text(SCHEMA));
    byId("decoding").append(this.#choice(LOOKAHEAD), this.#number(BUDGET), this.#choice(THINKING));
    byId("reset").addEventListener("click", () => this.#reset());
    byId("fields").addEventListener("submit", (event) => event.preventDefault());
    this.#hide();
  }

  /** What goes into a request: what was set, and what the page says itself. */
  get fields() {
    const { lookahead, budget, thinking, stop, form, schema, ...numbers } = this.values;
    const format = formOf(form, schema);
    return {
      ...this.page,
      ...numbers,
      ...(stop && { stop: stop.split("\n").filter(Boolean) }),
      ...(format && { response_format: format }),
      ...(lookahead === "off" && { lookahead: null }),
      ...(lookahead === "budget" && { lookahead: { budget: budget ?? 16 } }),
      ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
    };
  }

  /** Show what holds where nothing is set, of which the page says a part itself. */
  suggest(defaults, page) {
    this.page = page;
    for (const [name, value] of Object.entries({ ...UNSET, ...defaults, ...page })) {
      const input = byId(`set-${name}`);
      if (input) input.placeholder = value;
    }
  }

  #number({ name, label, hint, ...bounds }) {
    const input = element("input", { type: "number", id: `set-${name}`, inputmode: "decimal", ...bounds });
    input.value = this.values[name] ?? "";
    input.addEventListener("change", () => {
      const right = input.checkValidity();
      mark(input, right ? "" : `${input.validationMessage} It is not sent.`);
      this.#set(name, input.value === "" || !right ? undefined : Number(input.value));
    });
    return this.#field(name, label, hint, input);
  }

  #text({ name, label, hint, placeholder }) {
    const input = element("textarea", { id: `set-${name}`, rows: "1", placeholder, spellcheck: "false" });
    input.value = this.values[name] ?? "";
    input.addEventListener("change", () => this.#set(name, input.value || undefined));
    return this.#field(name, label, hint, input);
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
    return element("div", { class: "field", id: `field-${name}` }, words, input, element("small", { class: "wrong", role: "status" }));
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
    for (const input of document.querySelectorAll("[id^=set-]")) {
      input.value = input.tagName === "SELECT" ? "auto" : "";
      mark(input, "");
    }
    this.#hide();
  }

  #hide() {
    byId("field-budget").hidden = this.values.lookahead !== "budget";
    byId("field-schema").hidden = this.values.form !== "schema";
    mark(byId("set-schema"), formOf("schema", this.values.schema) ? "" : "This is not a JSON object: the answer may be any text.");
  }
}

/** Say below a field what is wrong with it; "": nothing. */
function mark(input, words) {
  input.setAttribute("aria-invalid", words !== "");
  input.parentElement.lastChild.textContent = words;
}

/** A `response_format`; undefined for any text, and where the schema is none. */
function formOf(form, text) {
  if (form === "json") return { type: "json_object" };
  const schema = form === "schema" ? objectIn(text) : undefined;
  return schema && { type: "json_schema", json_schema: { name: "answer", schema } };
}

function objectIn(text = "") {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? value : undefined;
  } catch (error) {
    if (error instanceof SyntaxError) return undefined;
    throw error;
  }
}
