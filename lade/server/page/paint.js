// Colours in rendered text.

import { colour } from "./sources.js";

const WITHOUT_TEXT = "table, thead, tbody, tr, ul, ol"; // between whose children there are line ends only
const REACH = 200; // how far ahead a character is looked for: further, and it is another one

/**
 * Wrap each token's characters in a span that has its source as class and its number in `data-token`.
 *
 * What is rendered is the text without its marks, so the two are walked side by side: each character is the next such one of
 * the text. Where that fails (an entity, a repeated address) a few characters have their neighbour's colour, no more.
 *
 * @param root its text nodes are painted
 * @param text what it was rendered from
 * @param spans tokens with `start` and `end` in the text, in order
 * @param first number of the first of them
 */
export function paint(root, text, spans, first = 0) {
  if (!spans.length) return;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (!walker.currentNode.parentNode.matches(WITHOUT_TEXT)) nodes.push(walker.currentNode);
  const place = { at: 0, token: 0 };
  for (const node of nodes) node.replaceWith(...pieces(node.data, text, spans, place, first));
}

function* pieces(data, text, spans, place, first) {
  let begun = 0;
  let owner = null;
  for (let index = 0; index < data.length; index += 1) {
    const ahead = text.slice(place.at, place.at + REACH).indexOf(data[index]);
    if (ahead === 0 || (ahead > 0 && data[index].trim())) place.at += ahead + 1;
    else if (owner !== null) continue; // of the one before it
    while (place.token < spans.length - 1 && spans[place.token].end < place.at) place.token += 1;
    const now = spans[place.token].start < place.at && place.at <= spans[place.token].end ? place.token : null;
    if (now !== owner) {
      if (index > begun) yield piece(data.slice(begun, index), spans[owner], owner, first);
      [begun, owner] = [index, now];
    }
  }
  if (data.length > begun) yield piece(data.slice(begun), spans[owner], owner, first);
}

function piece(text, span, number, first) {
  if (!span) return document.createTextNode(text);
  const made = document.createElement("span");
  made.className = `token ${colour(span.source)}`;
  made.dataset.token = first + number;
  made.dataset.step = span.step;
  made.textContent = text;
  return made;
}
