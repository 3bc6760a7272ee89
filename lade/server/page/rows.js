// What the engine is doing: its rows, as they are now.

import { status } from "./api.js";
import { byId, element } from "./dom.js";

const PERIOD_MS = 1000;
const STATES = { queued: "waits", waiting: "waits", prefill: "reads its prompt", decoding: "writes" };

/** The drawer of live rows: asks the server each second while it is open and the tab is seen. */
export class Rows {
  constructor() {
    this.body = byId("rows-body");
    this.timer = null;
  }

  open() {
    this.timer ??= setInterval(() => document.hidden || this.#refresh(), PERIOD_MS);
    this.#refresh();
  }

  close() {
    clearInterval(this.timer);
    this.timer = null;
  }

  async #refresh() {
    try {
      this.#show(await status());
    } catch (problem) {
      this.body.replaceChildren(element("p", { class: "problem" }, problem.message));
    }
  }

  #show({ rows = [], rows_limit: limit, waiting_limit: places, kv_slots: slots }) {
    const waiting = rows.filter(({ state }) => state === "queued" || state === "waiting").length;
    const gauges = [gauge("Rows", rows.length - waiting, limit), gauge("Waiting", waiting, places)];
    if (slots) gauges.push(gauge("Cache", slots.used, slots.limit));
    const list = rows.map((row) => rowItem(row));
    this.body.replaceChildren(
      element("div", { class: "gauges" }, ...gauges),
      rows.length ? element("ul", { class: "rows" }, ...list) : element("p", { class: "faint" }, "Nobody is being answered."),
    );
  }
}

function gauge(label, value, limit) {
  const words = element("span", {}, label, element("b", {}, limit ? ` ${value} of ${limit}` : ` ${value}`));
  return element("label", {}, words, limit ? element("meter", { min: "0", max: limit, value }) : null);
}

function rowItem({ id, state, age_s: age, prompt_tokens: prompt, answer_tokens: tokens, tokens_per_step: rate }) {
  const line = `${prompt} tokens read, ${tokens} written`;
  return element("li", { class: state, title: id },
    element("span", { class: "row-state" }, element("i"), STATES[state] ?? state, element("small", {}, ` ${Math.round(age)} s`)),
    element("span", { class: "row-rate" }, rate ? rate.toFixed(2) : "–", element("small", {}, " per pass")),
    element("span", { class: "faint row-line" }, line));
}
