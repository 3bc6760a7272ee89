// Markdown to elements. What a model writes is a stranger's text: all of it goes through DOMPurify.

import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";
import hljs from "./vendor/highlight.min.js";

const MAX_MS = 500; // for one text: marked is quadratic in some
const DEEPEST = 40; // tokens within tokens: marked and layout overflow where they go on, and nobody reads them
const HIGHLIGHT_MS = 50; // for half of a block of code: highlight.js is quadratic in some
const LONGEST_LINE = 1000; // of highlighted code

const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p",
    "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "checked", "class", "data-language", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "checked", "data-language", "disabled", "start", "type"], // all but `href` are no addresses
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const RENDERER = {
  html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)), // shown as it was written
  image: ({ raw }) => escaped(raw), // nothing is ever loaded
  code: ({ text, lang }) => `<pre data-language="${escaped(lang ?? "")}"><code>${highlighted(text, lang ?? "")}</code></pre>`,
};

/** Parses and renders one text, again and again while it grows. */
export class Markdown {
  #ends = Infinity;
  #marked;

  constructor() {
    const check = () => this.#check();
    const tokenizer = { space: check, escape: check }; // the first to be tried
    this.#marked = new Marked({ renderer: RENDERER, tokenizer });
  }

  /**
   * The blocks of a text, each with where it begins: `{raw, start, token}`.
   * @throws Error it is nested too deep, or takes too long
   */
  blocks(text) {
    this.#ends = performance.now() + MAX_MS;
    const blocks = [];
    let start = 0;
    for (const token of this.#marked.lexer(text)) {
      if (tooDeep(token)) throw new RangeError("nested too deep");
      if (token.type !== "space") blocks.push({ raw: token.raw, start, token });
      start += token.raw.length;
    }
    return blocks;
  }

  /** A block as elements that hold nothing but text, structure and links. Raises as `blocks` does. */
  render({ token }) {
    this.#check();
    const fragment = DOMPurify.sanitize(this.#marked.parser([token]), ALLOWED);
    for (const link of fragment.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    return fragment;
  }

  /** @returns false: marked goes on as if it had not been asked */
  #check() {
    if (performance.now() > this.#ends) throw new RangeError(`not drawn within ${MAX_MS} ms`);
    return false;
  }
}

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

const tooDeep = ({ tokens = [], items = [] }, levels = 0) =>
  levels > DEEPEST || tokens.some((token) => tooDeep(token, levels + 1)) || items.some((item) => tooDeep(item, levels + 1));

/** Code as HTML: without colours where a part of it shows that they would take too long. */
function highlighted(code, language) {
  if (!hljs.getLanguage(language) || code.split("\n").some(({ length }) => length > LONGEST_LINE)) return escaped(code);
  for (let size = 1024; ; size *= 2) {
    const begun = performance.now();
    const html = hljs.highlight(code.slice(0, size), { language }).value;
    if (size >= code.length) return html;
    if (performance.now() - begun > HIGHLIGHT_MS) return escaped(code);
  }
}
