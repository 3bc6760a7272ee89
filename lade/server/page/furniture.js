// What stands around the conversation: drawers, dialogs, menus, keys, themes, words that go by.

import { byId, element, icon } from "./dom.js";
import { SOURCES } from "./sources.js";
import { keep, setting } from "./store.js";

const TOAST_MS = 6000;
const THEMES = ["system", "light", "dark"];
const PHONE = matchMedia("(max-width: 760px)");

/** The panels left and right; on a phone they cover the conversation. */
export class Drawers {
  constructor() {
    this.buttons = { sidebar: byId("menu"), settings: byId("show-settings") };
    for (const [id, button] of Object.entries(this.buttons)) button.addEventListener("click", () => this.set(id, byId(id).hidden));
    for (const button of document.querySelectorAll("[data-close]")) {
      button.addEventListener("click", () => this.set(button.dataset.close, false));
    }
    document.querySelector("main").addEventListener("pointerdown", (event) => {
      if (!event.target.closest("header") && this.#covering().length) this.closeTop();
    });
    PHONE.addEventListener("change", () => this.#fit());
    this.#fit();
  }

  set(id, open) {
    const panel = byId(id);
    if (panel.hidden === !open) return;
    panel.hidden = !open;
    this.buttons[id].setAttribute("aria-expanded", open);
    if (open) panel.querySelector("button, input, textarea")?.focus({ preventScroll: true });
    else if (panel.contains(document.activeElement) || document.activeElement === document.body) this.buttons[id].focus();
  }

  /** Close what covers the conversation. @returns whether anything was closed */
  closeTop() {
    const open = ["settings", ...(PHONE.matches ? ["sidebar"] : [])].filter((id) => !byId(id).hidden);
    for (const id of open) this.set(id, false);
    return open.length > 0;
  }

  /** On a phone the list goes away when a conversation was chosen. */
  chosen() {
    if (PHONE.matches) this.set("sidebar", false);
  }

  /** Those that lie over the conversation. */
  #covering() {
    return ["sidebar", "settings"].filter((id) => !byId(id).hidden && getComputedStyle(byId(id)).position === "fixed");
  }

  #fit() {
    byId("sidebar").hidden = PHONE.matches;
    this.buttons.sidebar.setAttribute("aria-expanded", !PHONE.matches);
  }
}

/** Ask for a key. @returns a promise of the key, or of null where none was given */
export function askForKey({ wrong }) {
  byId("key-wrong").hidden = !wrong;
  return answered(byId("key-dialog"), "");
}

/** Ask for a conversation's name. @returns as `askForKey` */
export const askForName = (title) => answered(byId("name-dialog"), title);

/** What is filled into a dialog's one field; null where it is closed without. */
function answered(dialog, value) {
  const field = dialog.querySelector("input");
  field.value = value;
  if (!dialog.open) dialog.showModal();
  field.select();
  return new Promise((done) => {
    let given = null;
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      given = field.value.trim() || null;
      dialog.close();
    };
    dialog.onclose = () => {
      field.value = "";
      done(given);
    };
  });
}

export function prepareDialogs() {
  byId("sources").append(...SOURCES.filter(({ name }) => name !== "other").flatMap(({ name, label, meaning, guessed }) => [
    element("dt", {}, element("i", { class: `swatch ${guessed ? name : "own"}` }), label), element("dd", {}, meaning)]));
  for (const button of document.querySelectorAll("[data-dismiss]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  byId("help").addEventListener("click", () => byId("help-dialog").showModal());
  prepareMenu();
}

/** Open a menu at a button. @param items `{label, drawing, action}`, the drawing an icon's name */
export function openMenu(button, items) {
  const menu = byId("actions");
  const chosen = (action) => () => { menu.hidePopover(); action(); };
  menu.replaceChildren(...items.map(({ label, drawing, action }) =>
    element("button", { type: "button", class: "quiet", role: "menuitem", onclick: chosen(action) }, icon(drawing), label)));
  menu.showPopover();
  const { bottom, left, right } = button.getBoundingClientRect();
  menu.style.top = `${Math.min(bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
  menu.style.left = `${Math.max(8, Math.min(left, right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
  menu.firstChild.focus();
}

function prepareMenu() {
  const menu = byId("actions");
  menu.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...menu.children];
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  });
}

/** Say something above the conversation that stays true for a while; null: nothing. */
export function banner(words) {
  const line = byId("banner");
  line.hidden = !words;
  if (words && line.textContent !== words) line.textContent = words;
}

/** Say something that goes by, with something that can be done about it: `{label, action}`. */
export function toast(words, remedy = null) {
  const line = byId("toast");
  line.replaceChildren(words);
  if (remedy) line.append(element("button", { type: "button", onclick: () => { line.hidden = true; remedy.action(); } }, remedy.label));
  line.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { line.hidden = true; }, TOAST_MS);
}

/** Say something to who listens to the page. */
export const tell = (words) => { byId("said").textContent = words; };

/** Light, dark, or as the system is. */
export function prepareTheme() {
  const button = byId("theme");
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.lastElementChild.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(setting("theme", "system")) + 1) % THEMES.length];
    keep("theme", next);
    apply(next);
  });
  apply(setting("theme", "system"));
}

/** Whether tokens have the colours of their sources. */
export function prepareColours() {
  const button = byId("paint");
  const apply = (on) => { document.body.classList.toggle("unpainted", !on); button.setAttribute("aria-pressed", on); };
  button.addEventListener("click", () => {
    keep("paint", !setting("paint", true));
    apply(setting("paint", true));
  });
  apply(setting("paint", true));
}

/** Keys that work everywhere. */
export function prepareKeys(app) {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open], :popover-open")) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape") { if (!app.drawers.closeTop()) app.stop(); }
    else if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") byId("new").click();
    else if (!typing && event.key === "/") byId("say").focus();
    else if (!typing && event.key === "?") byId("help").click();
    else return;
    event.preventDefault();
  });
}
