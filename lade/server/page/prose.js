// A text that grows, as Markdown: what did not change since the last time is left as it is.

import { copyButton, element } from "./dom.js";
import { blocksOf, rendered } from "./markdown.js";
import { paint } from "./paint.js";

/** A text as elements, its tokens painted. */
export class Prose {
  /** @param plain whether the text is shown as it is, for models that just continue one */
  constructor(plain) {
    this.plain = plain;
    this.node = element("div", { class: plain ? "prose plain" : "prose" });
    this.shown = []; // `{raw, painted, node}` of each block
  }

  /**
   * Show a text.
   * @param text all of it
   * @param spans its tokens
   * @param offset where the text begins, counted as the spans count
   */
  update(text, spans, offset = 0) {
    const blocks = this.plain ? [{ raw: text, start: 0 }] : blocksOf(text);
    for (const [index, block] of blocks.entries()) {
      const begin = offset + block.start;
      const [first, last] = [firstBehind(spans, begin), firstFrom(spans, begin + block.raw.length)];
      const before = this.shown[index];
      if (before?.raw === block.raw && before.painted === last - first) continue;
      const node = this.#made(block, spans.slice(first, last).map((span) => moved(span, begin)), first);
      if (before) before.node.replaceWith(node);
      else this.node.append(node);
      this.shown[index] = { raw: block.raw, painted: last - first, node };
    }
    for (const { node } of this.shown.splice(blocks.length)) node.remove();
  }

  #made(block, spans, first) {
    const node = element("div", {}, this.plain ? block.raw : rendered(block));
    paint(node, block.raw, spans, first);
    for (const code of node.querySelectorAll("pre")) {
      const head = element("div", { class: "code-head" }, element("span", {}, code.dataset.language || "code"));
      head.append(copyButton(() => code.textContent, "Copy the code"));
      code.tabIndex = 0; // long lines are scrolled by keys, too
      const box = element("div", { class: "code" }, head);
      code.replaceWith(box);
      box.append(code);
    }
    for (const table of node.querySelectorAll("table")) {
      const box = element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Table" });
      table.replaceWith(box);
      box.append(table);
    }
    return node;
  }
}

const moved = (span, by) => ({ ...span, start: span.start - by, end: span.end - by });

/** The first span that ends behind a place. */
const firstBehind = (spans, place) => firstWhere(spans, (span) => span.end > place);

/** The first span that begins at a place or behind it. */
const firstFrom = (spans, place) => firstWhere(spans, (span) => span.start >= place);

function firstWhere(spans, holds) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(spans[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}
