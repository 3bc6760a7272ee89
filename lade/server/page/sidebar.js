// The list of conversations.

import { byId, element, iconButton } from "./dom.js";

export class Sidebar {
  /** @param actions `{open(id), menu(id, button)}` */
  constructor(actions) {
    this.actions = actions;
  }

  /** @param conversations as `Store.all` has them @param running those that are being answered, by id */
  show(conversations, current, running) {
    byId("conversations").replaceChildren(...conversations.map((each) => this.#item(each, each.id === current, running.has(each.id))));
  }

  #item({ id, title, broken }, current, running) {
    const open = element("button", { type: "button", class: broken ? "quiet name faint" : "quiet name", onclick: () => this.actions.open(id) }, title || "New chat");
    if (current) open.setAttribute("aria-current", "page");
    const more = iconButton("more", `Actions for ${title || "New chat"}`, () => this.actions.menu(id, more));
    more.setAttribute("aria-haspopup", "menu");
    return element("li", { class: running ? "going" : null }, open, more);
  }
}
