// A text that grows, as Markdown: what did not change since the last time is left as it is.

import { copyButton, element } from "./dom.js";
import { Markdown } from "./markdown.js";
import { paint } from "./paint.js";

/** A text as elements, its tokens painted. */
export class Prose {
  /** @param plain whether the text is shown as it is, without Markdown */
  constructor(plain) {
    this.markdown = new Markdown();
    this.node = element("div");
    this.setPlain(plain);
  }

  /** Show the text as it is, or as Markdown, from the next update on. */
  setPlain(plain) {
    this.plain = plain;
    this.node.className = plain ? "prose plain" : "prose";
    this.node.replaceChildren();
    this.shown = []; // `{raw, painted, node}` of each block
  }

  /**
   * Show a text; what cannot be drawn as Markdown stays plain from then on.
   * @param text all of it
   * @param spans its tokens
   * @param offset where the text begins, counted as the spans count
   */
  update(text, spans, offset = 0) {
    try {
      this.#draw(this.plain ? [{ raw: text, start: 0 }] : this.markdown.blocks(text), spans, offset);
    } catch (error) {
      if (this.plain) throw error;
      console.info("Shown as plain text:", error.message);
      this.setPlain(true);
      this.update(text, spans, offset);
    }
  }

  #draw(blocks, spans, offset) {
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
    const node = element("div", {}, this.plain ? block.raw : this.markdown.render(block));
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
