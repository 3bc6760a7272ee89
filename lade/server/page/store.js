// Conversations and settings, kept in this browser alone.

const PREFIX = "lade.chat.";

export class Store {
  /** All conversations, the latest first. */
  all() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map((key) => read(key)).filter(Boolean).sort((one, other) => other.changed - one.changed);
  }

  get(id) {
    return read(PREFIX + id);
  }

  /**
   * Keep a conversation.
   * @returns false where the browser's room is used up: even without the steps of older answers it does not fit
   */
  save(conversation) {
    if (write(PREFIX + conversation.id, packed(conversation))) return true;
    for (const older of this.all().reverse()) {
      if (older.id === conversation.id) continue;
      for (const message of older.messages) delete message.trace;
      write(PREFIX + older.id, older);
      if (write(PREFIX + conversation.id, packed(conversation))) return true;
    }
    return false;
  }

  remove(id) {
    localStorage.removeItem(PREFIX + id);
  }

  /** Call back when another tab changed a conversation. */
  watch(changed) {
    addEventListener("storage", ({ key }) => key?.startsWith(PREFIX) && changed(key.slice(PREFIX.length)));
  }
}

/** A setting, or what it is as long as nobody set it. */
export const setting = (name, otherwise) => read(`lade.${name}`) ?? otherwise;
export const keep = (name, value) => write(`lade.${name}`, value);

export function newConversation() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), system: "", messages: [] };
}

/** As kept: without what only counts while an answer comes. */
function packed(conversation) {
  const messages = conversation.messages.map(({ running, note, trace, ...rest }) => ({ ...rest, ...(trace && { trace: trace.steps ?? trace }) }));
  return { ...conversation, messages };
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch (error) {
    if (error instanceof SyntaxError) return null; // not written by this page
    throw error;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    throw error;
  }
}
