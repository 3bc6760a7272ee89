// What each forward pass yielded.

import { letterOf, sourceOf } from "./sources.js";

/** Whether something has the form of the steps that `Trace` takes. */
export function isTrace(steps) {
  return Array.isArray(steps) && steps.every((step) => {
    const [fed, letters, lengths] = Array.isArray(step) ? step : [];
    return typeof fed === "number" && typeof letters === "string" && letters.length > 0 && Array.isArray(lengths)
      && lengths.length === letters.length && lengths.every((length) => Number.isInteger(length) && length >= 0);
  });
}

/**
 * The steps of one answer, in a form small enough to be kept: `[fed, letters of the sources, lengths of the tokens' texts]`.
 * The texts joined are the answer: its reasoning, then its content.
 */
export class Trace {
  #placed = { steps: 0, spans: [], bounds: [] };

  constructor(steps = []) {
    this.steps = steps;
  }

  /** Add a step: the `lade` member of an event. */
  add({ sources, texts, fed }) {
    this.steps.push([fed, sources.map(letterOf).join(""), texts.map((text) => text.length)]);
  }

  /** Steps behind prefill, which is no step of decoding. */
  get decoding() {
    return this.steps.filter(([, letters]) => !letters.startsWith("0"));
  }

  get tokens() {
    return this.steps.reduce((sum, [, letters]) => sum + letters.length, 0);
  }

  /** Tokens for each pass behind prefill; 0 before the first one. */
  get tokensPerStep() {
    const steps = this.decoding;
    return steps.length ? steps.reduce((sum, [, letters]) => sum + letters.length, 0) / steps.length : 0;
  }

  /** The tokens with their places in the text: `{start, end, source, step, together, fed}`, `together` those of its step. */
  get spans() {
    for (; this.#placed.steps < this.steps.length; this.#placed.steps += 1) this.#place(this.#placed.steps);
    return this.#placed.spans;
  }

  /** The tokens of one step. */
  of(step) {
    return this.spans.slice(...this.#placed.bounds[step]);
  }

  #place(step) {
    const [fed, letters, lengths] = this.steps[step];
    const { spans, bounds } = this.#placed;
    bounds.push([spans.length, spans.length + letters.length]);
    for (const [index, length] of lengths.entries()) {
      const start = spans.at(-1)?.end ?? 0;
      spans.push({ start, end: start + length, source: sourceOf(letters[index]), step, together: letters.length, fed });
    }
  }

  /** How many tokens came from each source, most first. */
  counts() {
    const counts = new Map();
    for (const [, letters] of this.steps) {
      for (const letter of letters) counts.set(letter, (counts.get(letter) ?? 0) + 1);
    }
    return [...counts].map(([letter, count]) => [sourceOf(letter), count]).sort((one, other) => other[1] - one[1]);
  }
}
