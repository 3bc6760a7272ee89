// Elements, made in one line.

/** An element: `element("button", {class: "quiet", onclick: go}, "Go")`. Text is put in as text, never as markup. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** One of the drawings in index.html. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  drawing.append(use);
  return drawing;
}

/** A button that is an icon, with its name for those who do not see it. */
export function iconButton(name, label, onclick) {
  return element("button", { type: "button", class: "quiet icon", "aria-label": label, title: label, onclick }, icon(name));
}

/** Put a text on the clipboard; where the browser has none (a page without TLS), by a selection. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { class: "hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies what `text()` gives, and says that it did. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.dataset.done = "Copied";
    setTimeout(() => delete button.dataset.done, 1500);
  });
  return button;
}

const numbers = new Intl.NumberFormat("en");

/** `count(2000)` is "2,000". */
const count = (number) => numbers.format(number);

/** `counted(1, "token")` is "1 token", `counted(2000, "token")` is "2,000 tokens". */
export const counted = (number, noun, many = `${noun}s`) => `${count(number)} ${number === 1 ? noun : many}`;
