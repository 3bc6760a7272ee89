// The list of conversations.

import { byId, element, iconButton } from "./dom.js";

export class Sidebar {
  /** @param actions `{open(id), menu(id, button), importFiles(files)}` */
  constructor(actions) {
    this.actions = actions;
    this.search = byId("search");
    this.shown = [[], null, new Map()];
    this.search.addEventListener("input", () => this.#draw());
    const chosen = byId("import-files");
    byId("import").addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", () => { actions.importFiles([...chosen.files]); chosen.value = ""; });
  }

  /** @param conversations as `Store.all` has them @param running those that are being answered, by id */
  show(conversations, current, running) {
    this.shown = [conversations, current, running];
    this.#draw();
  }

  #draw() {
    const [conversations, current, running] = this.shown;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = conversations.filter(({ title, text }) => words.every((word) => `${title}\n${text}`.toLowerCase().includes(word)));
    byId("conversations").replaceChildren(...found.map((each) => this.#item(each, each.id === current, running.has(each.id))));
    byId("none-found").hidden = found.length > 0 || !words.length;
    this.search.hidden = conversations.length < 2 && !words.length;
  }

  #item({ id, title, broken }, current, running) {
    const open = element("button", { type: "button", class: broken ? "quiet name faint" : "quiet name", onclick: () => this.actions.open(id) }, title || "New chat");
    if (current) open.setAttribute("aria-current", "page");
    const more = iconButton("more", `Actions for ${title || "New chat"}`, () => this.actions.menu(id, more));
    more.setAttribute("aria-haspopup", "menu");
    return element("li", { class: running ? "going" : null }, open, more);
  }
}
