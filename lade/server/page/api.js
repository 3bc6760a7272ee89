// The server's routes, what its refusals mean, and its events.

const KEY = "lade.key";

/**
 * Why there is no answer, in words for whoever asked.
 * Its kind is `key`, `loading`, `busy`, `gone` (not there, going or dead), `refused` or `broken` (amid a stream).
 */
export class Problem extends Error {
  constructor(kind, message, code = null) {
    super(message);
    this.kind = kind;
    this.code = code;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/** Whether the server can answer: null if so, else the problem. Needs no key. */
export async function readiness() {
  const response = await reach("ready").catch((problem) => problem);
  if (response instanceof Problem) return response;
  if (response.ok) return null;
  const { status, reason } = await response.json().catch(() => ({}));
  return unready(status, reason);
}

export const models = () => getJson("v1/models");

/**
 * Stream an answer: yields the parsed events up to `[DONE]`.
 * A problem before or amid the stream is thrown; an `AbortError` where the signal was given.
 */
export async function* answer(path, body, { signal, session }) {
  const headers = { "content-type": "application/json", "x-session-id": session };
  const response = await reach(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  try {
    for await (const data of events(response.body)) {
      if (data.startsWith("[DONE]")) return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem("broken", sentence(event.error.message), event.error.code);
      yield event;
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
  }
  throw new Problem("broken", "The connection broke off before the answer was whole.");
}

async function getJson(path) {
  const response = await reach(path);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

async function reach(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key !== null && { authorization: `Bearer ${key}` }) };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("gone", "The server does not answer. Is it running?");
  }
}

async function refusal(response) {
  const { error = {} } = await response.json().catch(() => ({}));
  const { code = null, message = `The server answered ${response.status}.` } = error;
  if (response.status === 401) return new Problem("key", "The server asks for a key.", code);
  if (code === "model_loading") return unready("loading");
  if (code === "server_shutting_down") return unready("draining");
  if (code === "engine_overloaded" || code === "queue_timeout") {
    return new Problem("busy", "All rows and all waiting places of the server are taken.", code);
  }
  return new Problem(response.status === 503 ? "gone" : "refused", sentence(message), code);
}

function unready(state, reason) {
  if (state === "loading") return new Problem("loading", "The model is being loaded. This takes a moment.");
  if (state === "draining") return new Problem("gone", "The server is shutting down and takes nothing new.");
  return new Problem("gone", sentence(`The engine has stopped${reason ? `: ${reason}` : ""}`));
}

function sentence(text = "The server gave no reason") {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** What stands behind `data:` in each event, until the body ends. Comments, which keep the connection alive, are skipped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held = (held + value).replaceAll("\r\n", "\n");
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data) yield data;
      }
    }
  } finally {
    await reader.cancel(); // whoever stops reading closes the connection, and the server frees the row
  }
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
}
