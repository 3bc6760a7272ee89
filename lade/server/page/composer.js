// The field to write in.

import { byId } from "./dom.js";

export class Composer {
  /** @param app what is sent to, asked, and told to stop */
  constructor(app) {
    this.app = app;
    this.field = byId("say");
    this.#prepare();
    byId("stop").addEventListener("click", () => { app.stop(); this.field.focus(); });
  }

  /** Put a text into the field, for whoever goes on with it. */
  suggest(text) {
    this.field.value = text;
    this.#grow();
    this.field.focus();
  }

  /** What the model is, and whether it is answering here. */
  show({ plain }, going) {
    this.field.placeholder = plain ? "Begin a text" : "Say something";
    byId("send").hidden = going;
    byId("stop").hidden = !going;
  }

  #prepare() {
    const form = byId("composer");
    this.field.addEventListener("input", () => this.#grow());
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.app.takes(this.field.value)) return;
      this.app.send(this.field.value);
      this.field.value = "";
      this.#grow();
    });
  }

  #grow() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }
}
