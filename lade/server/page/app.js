// The page: what its parts do together.

import { ask, request } from "./asking.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { askForName, Drawers, openMenu, prepareColours, prepareDialogs, prepareKeys, prepareTheme, tell, toast } from "./furniture.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { keep, setting, Store } from "./store.js";
import { Trace } from "./trace.js";
import { Transcript } from "./transcript.js";

const TITLE_LENGTH = 80;
const SAVE_MS = 1000;

class App {
  constructor() {
    this.store = new Store();
    this.settings = new Settings();
    this.drawers = new Drawers();
    this.server = new Server(() => this.learned());
    this.running = new Map(); // the conversations that are being answered, by id: `{conversation, stop}`
    this.composer = new Composer(this);
    this.transcript = new Transcript(this);
    this.sidebar = new Sidebar(this);
    this.prepare();
    this.open(setting("open", null));
    this.server.connect();
  }

  prepare() {
    this.store.watch((id) => this.changedElsewhere(id));
    byId("new").addEventListener("click", () => { this.open(null); byId("say").focus(); });
    byId("more").addEventListener("click", () => this.menu(this.conversation.id, byId("more")));
    byId("system").addEventListener("change", ({ target }) => {
      this.conversation.system = target.value;
      if (this.conversation.messages.length) this.save(this.conversation);
    });
    addEventListener("pagehide", () => this.running.forEach(({ conversation }) => this.save(conversation)));
  }

  // What can be done with conversations.

  /** Show a conversation; where it cannot be drawn, what can be done about that. */
  open(id) {
    keep("open", id);
    this.drawers.chosen();
    this.broken = null;
    try {
      this.conversation = this.running.get(id)?.conversation ?? this.store.get(id) ?? new Conversation();
      byId("system").value = this.conversation.system;
      this.show();
    } catch (error) {
      console.info("A conversation cannot be drawn:", error.message);
      this.conversation = new Conversation();
      this.broken = id;
      this.transcript.showBroken(id);
      this.furnish();
    }
  }

  menu(id, button) {
    const broken = this.store.all().some((each) => each.id === id && each.broken);
    openMenu(button, [...(broken ? [] : [{ label: "Rename", drawing: "edit", action: () => this.rename(id) }]),
      { label: "Delete", drawing: "bin", action: () => this.remove(id) }]);
  }

  async rename(id) {
    const title = await askForName(this.get(id).title);
    if (title === null) return;
    const conversation = this.get(id);
    conversation.title = title;
    this.save(conversation);
    this.furnish();
  }

  remove(id) {
    this.running.get(id)?.stop();
    const raw = this.store.raw(id);
    const title = this.store.all().find((each) => each.id === id)?.title;
    this.store.remove(id);
    if (id === this.conversation.id || id === this.broken) this.open(null);
    else this.furnish();
    const undo = () => { this.store.restore(id, raw); this.open(id); };
    if (raw !== null) toast(`Deleted “${title || "New chat"}”.`, { label: "Undo", action: undo });
  }

  changedElsewhere(id) {
    if (id === this.conversation.id && !this.running.has(id)) this.open(id);
    else this.furnish();
  }

  get(id) {
    return id === this.conversation.id ? this.conversation : (this.running.get(id)?.conversation ?? this.store.get(id));
  }

  // What can be done with messages.

  suggest(text) {
    this.composer.suggest(text);
  }

  /** Whether such a message can be sent now. */
  takes(text) {
    return Boolean(this.server.plain ? text : text.trim()) && !this.running.has(this.conversation.id);
  }

  send(text) {
    const { conversation } = this;
    conversation.title ||= text.trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
    conversation.add({ role: "user", content: this.server.plain ? text : text.trim() });
    this.answer(conversation);
  }

  /** Send another version of a message. */
  edit(message, text) {
    if (!text.trim()) return;
    this.stop();
    this.conversation.branchAt(message);
    this.conversation.add({ role: "user", content: this.server.plain ? text : text.trim() });
    this.answer(this.conversation);
  }

  /** Let the model give another answer. */
  again(message) {
    this.stop();
    this.conversation.branchAt(message);
    this.answer(this.conversation);
  }

  /** Show another version of a message. */
  version(message) {
    this.stop();
    this.conversation.show(message);
    this.save(this.conversation);
    this.transcript.showVersion(this.conversation, this.server, message);
    this.furnish();
    tell("Another version is shown.");
  }

  stop() {
    this.running.get(this.conversation.id)?.stop();
    this.running.delete(this.conversation.id);
  }

  /** Let the model answer what was said last. */
  async answer(conversation) {
    const message = { role: "assistant", content: "", trace: new Trace(), running: true };
    const aborter = new AbortController();
    const own = { conversation, stop: () => aborter.abort() };
    conversation.add(message);
    this.running.set(conversation.id, own);
    this.broken = null;
    this.save(conversation);
    keep("open", this.conversation.id);
    this.show();
    tell("Answering.");
    await this.stream(conversation, message, aborter.signal);
    message.running = false;
    if (this.running.get(conversation.id) === own) this.running.delete(conversation.id);
    if (conversation.messages.includes(message)) this.save(conversation);
    this.transcript.changed(message);
    this.furnish();
    tell(message.problem ?? `The answer is ${message.finish === "stopped" ? "stopped" : "there"}.`);
  }

  /** As `ask`, until it is answered: asks for a key, and goes on as text where there is no chat template. */
  async stream(conversation, message, signal) {
    const changed = () => { this.transcript.changed(message); this.saveSoon(conversation); };
    for (;;) {
      try {
        const asked = request(conversation, this.settings.fields, this.server.plain);
        return await ask(asked, message, { signal, session: conversation.id, changed });
      } catch (problem) {
        if (problem.kind === undefined) throw problem;
        if (problem.kind === "key" && (await this.server.unlock())) continue;
        if (problem.code === "no_chat_template" && !this.server.plain) { this.server.continuesText(); continue; }
        message.problem = problem.message;
        message.code = problem.code;
        if (problem.kind === "gone") this.server.connect();
        return null;
      }
    }
  }

  // What is seen.

  /** More is known of the server. */
  learned() {
    const { model, plain, defaults, page } = this.server;
    byId("model").textContent = model;
    this.settings.suggest(defaults, page);
    if (document.body.classList.contains("plain") === plain || this.broken !== null) return this.furnish();
    document.body.classList.toggle("plain", plain);
    return this.show();
  }

  show() {
    this.transcript.show(this.conversation, this.server);
    this.furnish();
  }

  /** All but the messages. */
  furnish() {
    const { conversation, server } = this;
    byId("title").textContent = conversation.title || "New chat";
    byId("more").hidden = !conversation.messages.length;
    document.title = conversation.title ? `${conversation.title} · lade` : "lade";
    this.sidebar.show(this.store.all(), this.broken ?? conversation.id, this.running);
    this.composer.show(server, this.running.has(conversation.id));
  }

  save(conversation) {
    clearTimeout(this.saving);
    this.saving = null;
    if (!this.store.save(conversation)) toast("The browser keeps no more: delete some conversations, or this one is lost with the tab.");
  }

  saveSoon(conversation) {
    this.saving ??= setTimeout(() => this.save(conversation), SAVE_MS);
  }
}

prepareTheme();
prepareDialogs();
prepareColours();
prepareKeys(new App());
byId("say").focus();
