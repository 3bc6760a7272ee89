// The page: what its parts do together.

import { hasKey, models, readiness, setKey } from "./api.js";
import { ask, request } from "./asking.js";
import { prepareComposer, prepareKeys, preparePaint } from "./controls.js";
import { byId } from "./dom.js";
import { askForKey, banner, Drawers, prepareDialogs, prepareTheme, tell, toast } from "./furniture.js";
import { Rows } from "./rows.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { keep, newConversation, setting, Store } from "./store.js";
import { Trace } from "./trace.js";
import { Transcript } from "./transcript.js";

const TITLE_LENGTH = 80;
const SAVE_MS = 1000;
const LOOK_MS = 2000;

class App {
  constructor() {
    this.store = new Store();
    this.settings = new Settings();
    this.drawers = new Drawers({ rows: new Rows() });
    this.running = new Map(); // the conversations that are being answered, by id: `{conversation, stop}`
    this.plain = false; // whether the model has no chat template and continues text
    this.transcript = new Transcript(this);
    this.sidebar = new Sidebar(this);
    this.store.watch((id) => this.changedElsewhere(id));
    this.open(setting("open", null));
    this.connect();
  }

  // What can be done with conversations.

  open(id) {
    this.conversation = this.running.get(id)?.conversation ?? this.store.get(id) ?? newConversation();
    keep("open", this.conversation.id);
    byId("system").value = this.conversation.system;
    this.drawers.chosen();
    this.show();
  }

  rename(id, title) {
    this.change(id, (conversation) => { conversation.title = title; });
  }

  remove(id) {
    this.running.get(id)?.stop();
    const removed = this.store.get(id);
    this.store.remove(id);
    if (id === this.conversation.id) this.open(null);
    else this.list();
    const undo = () => { this.store.save(removed); this.open(id); };
    toast(`Deleted “${removed.title || "New chat"}”.`, { label: "Undo", action: undo });
  }

  download(id) {
    const { title, system, messages } = this.store.get(id);
    const turns = messages.map(({ role, content }) => ({ role, content }));
    const all = system ? [{ role: "system", content: system }, ...turns] : turns;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify({ title, messages: all }, null, 2)], { type: "application/json" }));
    link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, TITLE_LENGTH) || "chat"}.json`;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  change(id, how) {
    const conversation = id === this.conversation.id ? this.conversation : (this.running.get(id)?.conversation ?? this.store.get(id));
    how(conversation);
    this.save(conversation);
    this.title();
    this.list();
  }

  changedElsewhere(id) {
    if (id === this.conversation.id && !this.running.has(id)) this.open(id);
    else this.list();
  }

  // What can be done with messages.

  suggest(text) {
    byId("say").value = text;
    byId("say").dispatchEvent(new Event("input"));
    byId("say").focus();
  }

  send(text) {
    const { conversation } = this;
    if (!(this.plain ? text : text.trim()) || this.running.has(conversation.id)) return false;
    conversation.title ||= text.trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
    conversation.messages.push({ role: "user", content: this.plain ? text : text.trim() });
    this.answer();
    return true;
  }

  edit(message, text) {
    if (!text.trim()) return;
    this.cutAt(message);
    this.send(text);
  }

  again(message) {
    this.cutAt(message);
    this.answer();
  }

  /** Take a message and all behind it away. */
  cutAt(message) {
    this.stop();
    const { conversation } = this;
    const place = conversation.messages.indexOf(message);
    const removed = conversation.messages.splice(place);
    if (!removed.some(({ role, content }) => role === "assistant" && content)) return;
    const undo = () => {
      this.stop();
      conversation.messages.splice(place, Infinity, ...removed);
      this.save(conversation);
      this.open(conversation.id);
    };
    toast("The old answer is gone.", { label: "Undo", action: undo });
  }

  stop() {
    this.running.get(this.conversation.id)?.stop();
    this.running.delete(this.conversation.id);
  }

  /** Let the model answer what was said last. */
  async answer() {
    const { conversation } = this;
    const message = { role: "assistant", content: "", trace: new Trace(), running: true };
    const aborter = new AbortController();
    const own = { conversation, stop: () => aborter.abort() };
    conversation.messages.push(message);
    conversation.changed = Date.now();
    this.running.set(conversation.id, own);
    this.save(conversation);
    this.show();
    tell("Answering.");
    await this.stream(conversation, message, aborter.signal);
    message.running = false;
    if (this.running.get(conversation.id) === own) this.running.delete(conversation.id);
    if (conversation.messages.includes(message)) this.save(conversation);
    this.transcript.changed(message);
    this.buttons();
    this.list();
    tell(message.problem ?? `The answer is ${message.finish === "stopped" ? "stopped" : "there"}: ${message.trace.tokens} tokens, ${message.trace.tokensPerStep.toFixed(1)} in each pass.`);
  }

  /** As `ask`, until it is answered: asks for a key, and goes on as text where there is no chat template. */
  async stream(conversation, message, signal) {
    const changed = () => { this.transcript.changed(message); this.saveSoon(conversation); };
    for (;;) {
      try {
        return await ask(request(conversation, this.settings.fields, this.plain), message, { signal, session: conversation.id, changed });
      } catch (problem) {
        if (problem.kind === undefined) throw problem;
        if (problem.kind === "key" && (await this.unlock())) { this.learn(); continue; }
        if (problem.code === "no_chat_template" && !this.plain) { this.continuesText(); continue; }
        message.problem = problem.message;
        if (problem.kind === "gone") this.connect();
        return null;
      }
    }
  }

  // The server.

  /** Look at the server until it is ready, and say meanwhile what is the matter. */
  async connect() {
    if (this.connecting) return;
    this.connecting = true;
    for (let problem = await readiness(); problem; problem = await readiness()) {
      banner(problem.message);
      await new Promise((done) => setTimeout(done, LOOK_MS));
    }
    banner(null);
    this.connecting = false;
    await this.learn();
  }

  /** What is served. */
  async learn() {
    try {
      const { data: [model] } = await models();
      byId("model").textContent = model.id;
      if (model.lade?.chat === false) this.continuesText();
    } catch (problem) {
      if (problem.kind === undefined) throw problem;
      if (problem.kind !== "key") return this.connect();
      if (await this.unlock()) await this.learn();
    }
    return null;
  }

  async unlock() {
    this.asked ??= askForKey({ wrong: hasKey() });
    const key = await this.asked;
    this.asked = null;
    if (key) setKey(key);
    return key !== null;
  }

  continuesText() {
    this.plain = true;
    byId("say").placeholder = "Begin a text";
    document.body.classList.add("plain");
    this.show();
  }

  // What is seen.

  show() {
    this.transcript.show(this.conversation, this.plain);
    this.title();
    this.list();
    this.buttons();
  }

  title() {
    byId("title").textContent = this.conversation.title || "New chat";
    document.title = this.conversation.title ? `${this.conversation.title} · lade` : "lade";
  }

  list() {
    this.sidebar.show(this.store.all(), this.conversation.id, this.running);
  }

  buttons() {
    const going = this.running.has(this.conversation.id);
    byId("send").hidden = going;
    byId("stop").hidden = !going;
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
preparePaint();
const app = new App();
prepareComposer(app);
prepareKeys(app);
byId("say").focus();
