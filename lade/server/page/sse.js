// Server-sent events, read from a response's body.

/** What stands behind `data:` in each event, until the body ends. Comments, which keep the connection alive, are skipped. */
export async function* events(body) {
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
