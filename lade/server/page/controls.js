// Fields, buttons and keys, and what they do.

import { byId } from "./dom.js";
import { keep, setting } from "./store.js";

/** The field to write in, and what belongs to it. */
export function prepareComposer(app) {
  const [form, field] = [byId("composer"), byId("say")];
  const grow = () => { field.style.height = "auto"; field.style.height = `${field.scrollHeight}px`; };
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!app.send(field.value)) return;
    field.value = "";
    grow();
  });
  byId("stop").addEventListener("click", () => { app.stop(); field.focus(); });
  byId("new").addEventListener("click", () => { app.open(null); field.focus(); });
  byId("system").addEventListener("change", ({ target }) => {
    app.conversation.system = target.value;
    if (app.conversation.messages.length) app.save(app.conversation);
  });
  addEventListener("pagehide", () => app.running.forEach(({ conversation }) => app.save(conversation)));
}

/** Keys that work everywhere. */
export function prepareKeys(app) {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape") { if (!app.drawers.closeTop()) app.stop(); }
    else if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") byId("new").click();
    else if (!typing && event.key === "/") byId("say").focus();
    else if (!typing && event.key === "?") byId("help").click();
    else return;
    event.preventDefault();
  });
}

/** Whether tokens are coloured. */
export function preparePaint() {
  const button = byId("paint");
  const apply = (on) => { document.body.classList.toggle("unpainted", !on); button.setAttribute("aria-pressed", on); };
  button.addEventListener("click", () => {
    keep("paint", !setting("paint", true));
    apply(setting("paint", true));
  });
  apply(setting("paint", true));
}
