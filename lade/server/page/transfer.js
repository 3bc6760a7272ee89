// Conversations leave and enter: as files, and as Markdown.

import { contentOf } from "./asking.js";
import { Conversation, fullText, newId } from "./conversation.js";

const NAME_LENGTH = 80;

/**
 * A conversation as a file: under `messages` what is shown, as the API has it; under `lade` all of it, with its pictures.
 * @returns `{name, content}`
 */
export async function exported(conversation, pictures) {
  const { title, system, path } = conversation;
  const turns = await Promise.all(path.map(async (message) => ({ role: message.role, content: await contentOf(message, pictures) })));
  const ids = conversation.messages.flatMap(({ files = [] }) => files.flatMap(({ picture }) => picture ?? []));
  const urls = await Promise.all(ids.map(async (id) => [id, await pictures.get(id)]));
  const content = {
    title,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    lade: { conversation, pictures: Object.fromEntries(urls.filter(([, url]) => url)) },
  };
  return { name: fileName(title), content: JSON.stringify(content, null, 2) };
}

export const fileName = (title) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, NAME_LENGTH) || "chat"}.json`;

/**
 * The conversation in such a file, or in one that has only `messages`, or is a list of them.
 * @throws SyntaxError, TypeError there is none in it
 */
export function imported(content, pictures) {
  const value = JSON.parse(content);
  const { lade, title = "", messages } = Array.isArray(value) ? { messages: value } : Object(value);
  const fresh = { id: newId(), changed: Date.now() };
  if (Array.isArray(lade?.conversation?.messages)) {
    const conversation = new Conversation({ ...lade.conversation, ...fresh });
    for (const [id, url] of Object.entries(lade.pictures ?? {})) if (isPicture(url)) pictures.keep(url, id);
    return conversation;
  }
  if (!Array.isArray(messages) || !messages.length || !messages.every(Boolean)) throw new TypeError("there are no messages in it");
  const system = messages.filter(({ role }) => role === "system").map(({ content: said }) => textOf(said)).join("\n\n");
  const turns = messages.filter(({ role }) => role !== "system");
  const read = turns.map((turn) => turnOf(turn, pictures));
  return new Conversation({ ...fresh, title: title || read[0]?.content.slice(0, NAME_LENGTH), system, messages: read });
}

function turnOf({ role, content }, pictures) {
  const urls = Array.isArray(content) ? content.map((part) => part?.image_url?.url).filter(isPicture) : [];
  const files = urls.map((url) => ({ name: "picture", picture: pictures.keep(url) }));
  return { role, content: textOf(content), ...(files.length && { files }) };
}

const isPicture = (url) => typeof url === "string" && /^data:image\/(?:png|jpeg|webp|gif);base64,/.test(url);

const textOf = (content) => (Array.isArray(content) ? content.map((part) => part?.text ?? "").join("") : content ?? "");

/** What is shown of a conversation, as Markdown. */
export function asMarkdown({ title, system, path }) {
  const turns = path.map((message) => {
    const pictures = (message.files ?? []).filter(({ picture }) => picture).map(({ name }) => `(picture: ${name})`);
    return [message.role === "user" ? "## Question" : "## Answer", ...pictures, fullText(message)].join("\n\n");
  });
  return `${[`# ${title || "New chat"}`, ...(system ? ["## System prompt", system] : []), ...turns].join("\n\n")}\n`;
}
