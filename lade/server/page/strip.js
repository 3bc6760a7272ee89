// Steps as a picture and as a table.

import { element } from "./dom.js";
import { colour } from "./sources.js";

const ROWS_SHOWN = 2000; // more rows than this make no table that anybody reads

/** One column for each pass, one square for each of its tokens. Follows a trace that grows. */
export class Strip {
  constructor(trace) {
    this.trace = trace;
    this.shown = 0;
    this.node = element("div", { class: "strip", role: "img" });
  }

  update() {
    for (; this.shown < this.trace.steps.length; this.shown += 1) this.node.append(this.#column(this.shown));
    const { decoding, tokensPerStep } = this.trace;
    const rate = tokensPerStep.toFixed(2);
    this.node.scrollTop = this.node.scrollHeight;
    this.node.setAttribute("aria-label", `${decoding.length} forward passes, ${rate} tokens in each on average`);
  }

  #column(number) {
    const tokens = this.trace.of(number).map(({ source }) => element("i", { class: colour(source) }));
    return element("span", { "data-step": number }, ...tokens);
  }
}

/** Every step in words: what was fed, and the tokens that came of it. */
export function stepTable(trace, text) {
  const rows = trace.steps.slice(0, ROWS_SHOWN).map(([fed, letters], number) => {
    const tokens = trace.of(number).map(({ start, end, source }) => {
      return element("span", { class: `token ${colour(source)}`, title: source.label }, visible(text.slice(start, end)));
    });
    const sources = trace.of(number).map(({ source }) => source.label);
    return element("tr", {},
      element("td", {}, number), element("td", {}, fed), element("td", {}, letters.length),
      element("td", { class: "chips" }, ...tokens), element("td", {}, [...new Set(sources)].join(", ")));
  });
  const heads = ["Pass", "Fed", "Came", "Tokens", "From"].map((name) => element("th", { scope: "col" }, name));
  return element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "All passes" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}

const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
