// Markdown to elements. What a model writes is text of a stranger: everything goes through DOMPurify.

import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";
import hljs from "./vendor/highlight.min.js";

const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p",
    "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "checked", "class", "data-language", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "checked", "data-language", "disabled", "start", "type"], // all but `href` are no addresses
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)), // shown as it was written
    image: ({ raw }) => escaped(raw), // nothing is ever loaded
    code({ text, lang }) {
      const language = hljs.getLanguage(lang ?? "") ? lang : null;
      const html = language ? hljs.highlight(text, { language }).value : escaped(text);
      return `<pre data-language="${escaped(lang ?? "")}"><code>${html}</code></pre>`;
    },
  },
});

/** The blocks of a text, each with where it begins: `{raw, start, token}`. */
export function blocksOf(text) {
  const blocks = [];
  let start = 0;
  for (const token of marked.lexer(text)) {
    if (token.type !== "space") blocks.push({ raw: token.raw, start, token });
    start += token.raw.length;
  }
  return blocks;
}

/** A block as elements that hold nothing but text, structure and links. */
export function rendered({ token }) {
  const fragment = DOMPurify.sanitize(marked.parser([token]), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  return fragment;
}
