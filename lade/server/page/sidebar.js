// The list of conversations.

import { byId, element, iconButton } from "./dom.js";

export class Sidebar {
  /** @param actions `{open(id), rename(id, title), remove(id), download(id)}` */
  constructor(actions) {
    this.actions = actions;
    this.list = byId("conversations");
  }

  show(conversations, current, running) {
    this.list.replaceChildren(...conversations.map((conversation) => this.#item(conversation, current, running)));
  }

  #item({ id, title }, current, running) {
    const open = element("button", { type: "button", class: "quiet name", onclick: () => this.actions.open(id) }, title || "New chat");
    if (id === current) open.setAttribute("aria-current", "page");
    const item = element("li", { class: running.has(id) ? "going" : null }, open, element("span", { class: "tools" },
      iconButton("edit", "Rename", () => this.#rename(item, id, title)),
      iconButton("save", "Download", () => this.actions.download(id)),
      iconButton("bin", "Delete", () => this.actions.remove(id))));
    return item;
  }

  #rename(item, id, title) {
    const field = element("input", { "aria-label": "Name of the conversation", value: title });
    const done = () => this.actions.rename(id, field.value.trim() || title);
    field.addEventListener("blur", done);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") field.value = title;
      if (event.key === "Escape" || event.key === "Enter") field.blur();
      event.stopPropagation();
    });
    item.replaceChildren(field);
    field.select();
  }
}
