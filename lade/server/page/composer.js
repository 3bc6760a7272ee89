// The field to write in, and what belongs to it: attached files, and how full the context is.

import { attached, Tray } from "./attachments.js";
import { byId, count } from "./dom.js";
import { toast } from "./furniture.js";

const NEARLY_FULL = 0.85;

export class Composer {
  /** @param app what is sent to, asked, and told to stop */
  constructor(app) {
    this.app = app;
    this.field = byId("say");
    this.tray = new Tray(byId("tray"), () => this.#grow());
    this.#prepareField();
    this.#prepareFiles();
    byId("stop").addEventListener("click", () => { app.stop(); this.field.focus(); });
    byId("drop").addEventListener("click", () => app.dropOldest());
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

  /** How much of the context is taken. @param tokens null: unknown */
  meter(tokens, context, canDrop) {
    const known = tokens !== null && context !== null;
    byId("context").hidden = !known;
    if (!known) return;
    const [gauge, share] = [byId("context-gauge"), tokens / context];
    gauge.max = context;
    gauge.value = tokens;
    gauge.high = NEARLY_FULL * context;
    byId("context-words").textContent = `${count(Math.min(tokens, context))} of ${count(context)} tokens`;
    byId("drop").hidden = share < NEARLY_FULL || !canDrop;
  }

  #prepareField() {
    const form = byId("composer");
    this.field.addEventListener("input", () => this.#grow());
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.app.takes(this.field.value, this.tray.files)) return;
      this.app.send(this.field.value, this.tray.take());
      this.field.value = "";
      this.#grow();
    });
  }

  #prepareFiles() {
    const chosen = byId("files");
    byId("attach").addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", () => { this.#attach(chosen.files); chosen.value = ""; });
    this.field.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#attach(event.clipboardData.files);
    });
    const main = document.querySelector("main");
    const over = (event) => event.dataTransfer?.types.includes("Files");
    main.addEventListener("dragover", (event) => { if (over(event)) { event.preventDefault(); main.classList.add("dropping"); } });
    main.addEventListener("dragleave", (event) => { if (!main.contains(event.relatedTarget)) main.classList.remove("dropping"); });
    main.addEventListener("drop", (event) => {
      if (!over(event)) return;
      event.preventDefault();
      main.classList.remove("dropping");
      this.#attach(event.dataTransfer.files);
    });
  }

  /** A model that continues text gets a file's text into the field. */
  async #attach(files) {
    const { server } = this.app;
    for (const file of [...files]) {
      try {
        const made = await attached(file, { images: server.images && !server.plain });
        if (server.plain) this.suggest(this.field.value + made.text);
        else this.tray.add(made);
      } catch (problem) {
        toast(problem.message);
      }
    }
    this.field.focus();
  }

  #grow() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }
}
