// Where tokens come from: the labels that the engine gives, and what they mean.

/** `letter` stands for the source in what is kept; sources that are not `guessed` have no colour. */
export const SOURCES = [
  { name: "memory", letter: "m", guessed: true, label: "memory", meaning: "the model's own predictions at such a place before, in this or earlier texts" },
  { name: "pool", letter: "p", guessed: true, label: "pool", meaning: "n-grams that looking ahead in this text has gathered" },
  { name: "window", letter: "w", guessed: true, label: "window", meaning: "looking ahead: guesses that were refined over the last passes" },
  { name: "prompt", letter: "q", guessed: true, label: "prompt", meaning: "continues as the prompt did after the same words" },
  { name: "text", letter: "t", guessed: true, label: "text", meaning: "continues as the answer itself, or the text read beside it, did" },
  { name: "prediction", letter: "e", guessed: true, label: "prediction", meaning: "taken from the expected answer that came with the request" },
  { name: "grammar", letter: "g", guessed: true, label: "grammar", meaning: "the only token that the schema or grammar left" },
  { name: "bonus", letter: "b", guessed: false, label: "the model", meaning: "not guessed: what the model wrote itself, one in each pass" },
  { name: "prefill", letter: "0", guessed: false, label: "first token", meaning: "the token that reading the prompt yields" },
  { name: "other", letter: "x", guessed: true, label: "another source", meaning: "of a kind that this page has no name for" },
];

const byName = new Map(SOURCES.map((source) => [source.name, source]));
const byLetter = new Map(SOURCES.map((source) => [source.letter, source]));

export const letterOf = (name) => (byName.get(name) ?? byName.get("other")).letter;
export const sourceOf = (letter) => byLetter.get(letter) ?? byName.get("other");

/** The class of a source: only what was guessed has a colour of its own. */
export const colour = (source) => (source.guessed ? source.name : "own");
