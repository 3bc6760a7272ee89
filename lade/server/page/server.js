// The server that the page came from: whether it is ready, what it serves, and the key that it asks for.

import { hasKey, models, readiness, setKey } from "./api.js";
import { askForKey, banner } from "./furniture.js";

const LOOK_MS = 2000;

const pause = () => new Promise((done) => setTimeout(done, LOOK_MS));

export class Server {
  model = ""; // its name
  plain = false; // whether it has no chat template and continues text
  context = null; // how many tokens it reads and writes at most; null: unknown
  defaults = {}; // what it does where a request does not say
  page = {}; // what the page says where nobody has set it: no sampling where the checkpoint asks for none
  #asking = null;
  #connecting = false;

  /** @param changed is called when more is known */
  constructor(changed) {
    this.changed = changed;
  }

  /** Look at the server until it is ready, and say meanwhile what is the matter. */
  async connect() {
    if (this.#connecting) return;
    this.#connecting = true;
    for (let problem = await readiness(); problem; problem = await readiness()) {
      banner(problem.message);
      await pause();
    }
    banner(null);
    this.#connecting = false;
    await this.learn();
  }

  /** Ask what is served. */
  async learn() {
    try {
      const { data: [{ id, lade = {} }] } = await models();
      const { chat = true, context = null, defaults = {}, page = {} } = lade;
      Object.assign(this, { model: id, plain: this.plain || !chat, context, defaults, page });
      this.changed();
    } catch (problem) {
      if (problem.kind === undefined) throw problem;
      if (problem.kind === "key") await this.unlock();
      else this.#later(problem);
    }
  }

  /** Look again in a while. */
  async #later(problem) {
    banner(problem.message);
    await pause();
    this.connect();
  }

  /** Ask for the key, once at a time. @returns whether one was given */
  async unlock() {
    this.#asking ??= askForKey({ wrong: hasKey() });
    const key = await this.#asking;
    this.#asking = null;
    if (!key) return false;
    setKey(key);
    this.learn();
    return true;
  }

  /** It has turned out that there is no chat template. */
  continuesText() {
    this.plain = true;
    this.changed();
  }
}
