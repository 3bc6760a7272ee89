// Formulas: TeX between dollar signs or \( \), drawn as MathML by Temml, which is loaded when the first one is met.

import DOMPurify from "./vendor/purify.es.mjs";
import { element } from "./dom.js";

const LONGEST = 2000; // characters; longer ones stay TeX
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 100, maxSize: [20, 20] };
const ALLOWED = { USE_PROFILES: { mathMl: true }, ADD_TAGS: ["span"], ADD_ATTR: ["class", "style"], IN_PLACE: true };
const INLINE = [/^\$\$(?!\s*\$\$)([^$]+?)\$\$/, /^\\\[([^]+?)\\\]/, /^\\\(([^]+?)\\\)/, /^\$(?![\s$])((?:\\[^]|[^\\$\n`])*?[^\s\\$`])\$(?!\w)/];
const SHOWN = 2; // so many of these stand on a line of their own
const BLOCK = [/^ {0,3}\$\$([^]+?)\$\$ *(?:\n|$)/, /^ {0,3}\\\[([^]+?)\\\] *(?:\n|$)/];

/** What marked is told of formulas. They become `<span class="maths">` with their TeX as text. */
export const FORMULAS = [
  {
    name: "maths",
    level: "inline",
    start: (text) => firstOf(text.search(/\$|\\[([]/)),
    tokenizer(text) {
      const index = INLINE.findIndex((form) => form.test(text));
      return index < 0 ? undefined : token("maths", INLINE[index].exec(text), index < SHOWN);
    },
    renderer: asSpan,
  },
  {
    name: "mathsBlock",
    level: "block",
    start: (text) => firstOf(text.search(/^ {0,3}(?:\$\$|\\\[)/m)),
    tokenizer(text) {
      const found = BLOCK.map((form) => form.exec(text)).find(Boolean);
      return found ? token("mathsBlock", found, true) : undefined;
    },
    renderer: (found) => `<p>${asSpan(found)}</p>`,
  },
];

const firstOf = (place) => (place < 0 ? undefined : place);

const token = (type, [raw, tex], shown) => (tex.trim() && tex.length <= LONGEST ? { type, raw, tex: tex.trim(), shown } : undefined);

function asSpan({ tex, shown }) {
  const escaped = tex.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  return `<span class="maths${shown ? " shown" : ""}">${escaped}</span>`;
}

let temml = null; // a promise of it

/** Draw the formulas in some elements. One that Temml does not know stays TeX, as do all where it cannot be loaded. */
export async function drawFormulas(root) {
  const places = [...root.querySelectorAll(".maths")];
  if (!places.length) return;
  temml ??= loaded();
  try {
    const { render } = await temml;
    for (const place of places) draw(place, render);
  } catch (error) {
    console.info("Formulas stay TeX:", error.message);
  }
}

function draw(place, render) {
  const box = element("span");
  try {
    render(place.textContent, box, { ...OPTIONS, displayMode: place.classList.contains("shown") });
  } catch (error) {
    place.title = error.message; // of Temml's parser, or too much recursion
    return;
  }
  place.replaceChildren(...DOMPurify.sanitize(box, ALLOWED).childNodes);
  place.classList.add("drawn");
}

/** Temml is a script of the kind that makes a global name. */
function loaded() {
  return new Promise((done, failed) => {
    const script = element("script", { src: new URL("vendor/temml.min.js", import.meta.url).href });
    script.onload = () => done(globalThis.temml);
    script.onerror = () => failed(new Error("Temml cannot be loaded"));
    document.head.append(script);
  });
}
