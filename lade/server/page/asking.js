// From a conversation to an answer that streams into it.

import { answer, Problem, readiness } from "./api.js";

const PAUSE_MS = 1000;

/**
 * What is sent: for a chat its messages, for a model that only continues text the text so far.
 */
export function request(conversation, fields, plain) {
  const said = conversation.path.slice(0, -1); // the last one is the answer that is to come
  const before = said.filter(({ role, content }) => role === "user" || content); // no answers that failed
  const common = { ...fields, stream: true, stream_options: { include_usage: true }, lade: { trace: true } };
  if (plain) {
    const { chat_template_kwargs: _, response_format: form, ...rest } = common;
    const prompt = before.map(({ content }) => content).join("");
    return ["v1/completions", { ...rest, ...(form && { structured_outputs: asOutputs(form) }), prompt }];
  }
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const turns = before.map(({ role, content }) => ({ role, content }));
  return ["v1/chat/completions", { ...common, messages: [...system, ...turns] }];
}

/** A `response_format` as `/v1/completions` has it. */
const asOutputs = ({ json_schema: form }) => (form ? { json: form.schema } : { json_object: true });

/**
 * Let an answer stream into its message.
 *
 * @param message is filled: `content, reasoning, trace, finish, told, usage, seconds`, or `problem`
 * @param changed called whenever the message has
 * @throws Problem what hinders the answer; what came before it stays
 */
export async function ask([path, body], message, { signal, session, changed }) {
  let begun = null;
  try {
    for await (const event of patiently(path, body, { signal, session }, message, changed)) {
      begun ??= performance.now();
      take(event, message);
      message.seconds = (performance.now() - begun) / 1000;
      changed();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    message.finish = "stopped";
  }
}

/** The answer's events; as long as the model is being loaded it is waited for. */
async function* patiently(path, body, options, message, changed) {
  for (;;) {
    try {
      return yield* answer(path, body, options);
    } catch (error) {
      if (!(error instanceof Problem && error.kind === "loading")) throw error;
      message.note = error.message;
      changed();
      while ((await readiness())?.kind === "loading") await pause(options.signal);
      message.note = "";
    }
  }
}

function take({ choices, usage, lade }, message) {
  if (usage) message.usage = usage;
  const [choice] = choices;
  if (choice) {
    const { delta = {}, text, finish_reason: finish } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    message.content += delta.content ?? text ?? "";
    if (finish) message.finish = finish;
  }
  if (lade?.sources?.length) message.trace.add(lade);
  if (lade?.steps !== undefined) message.told = lade;
}

function pause(signal) {
  return new Promise((done, failed) => {
    const timer = setTimeout(done, PAUSE_MS);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      failed(signal.reason);
    }, { once: true });
  });
}
