/** The server's chat API, as a stream of chunks. */

/** An error that the server answered with. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The JSON of a GET. Throws ServerError. */
export async function get(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** The answer to JSON. Throws ServerError. */
export async function send(method, path, body, key, signal) {
  const response = await fetch(path, {
    method,
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return response;
}

/** The objects of a body that has one in each line. */
export async function* lines(stream) {
  for await (const line of parts(stream, "\n")) yield JSON.parse(line);
}

/**
 * The chunks of an answer to `body.messages`. While the model is still being loaded: `{ waiting }`,
 * a line that says how far that is. Aborting `signal` closes the connection, which frees the
 * model's slot. Throws ServerError, and what `fetch` throws.
 */
export async function* chatStream(body, key, signal) {
  const asked = { ...body, stream: true, draft_detail: true };
  const response = await send("POST", "v1/chat/completions", asked, key, signal);
  for await (const { comment, data } of events(response.body)) {
    if (comment) yield { waiting: comment };
    if (data === undefined) continue;
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  throw new ServerError("the connection broke off in the middle of the answer");
}

/** The `data` or the `comment` of each server-sent event. */
async function* events(stream) {
  for await (const part of parts(stream, "\n\n")) {
    const lines = part.split("\n");
    const data = lines.filter((line) => line.startsWith("data: "));
    if (data.length) yield { data: data.map((line) => line.slice(6)).join("\n") };
    else if (lines[0].startsWith(": ")) yield { comment: lines[0].slice(2) };
  }
}

/** The parts of a text that `mark` ends. */
async function* parts(stream, mark) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const found = (rest + value).split(mark);
      rest = found.pop();
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    const { error } = await response.json();
    message = error.message ?? error; // Ollama's is the text alone
  } catch {
    // A proxy between us and the server may answer with something else.
  }
  return new ServerError(message, response.status);
}
