import assert from "node:assert/strict";
import { test } from "node:test";

import { APIUserAbortError } from "openai";

import { CERTAIN, MODEL, QUESTION, collect, connect, untilBusy, user } from "./served.js";

const sdk = connect();
const asked = { model: MODEL, messages: user(QUESTION), temperature: 0 };
const endless = { ...asked, ignore_eos: true };
const COLOUR = {
  type: "object",
  properties: {
    name: { enum: ["red", "green"] },
    parts: { type: "array", items: { type: "integer", maximum: 99 }, minItems: 2, maxItems: 2 },
  },
  required: ["name", "parts"],
  additionalProperties: false,
};

test("a chat", async () => {
  const { data, response } = await sdk.chat.completions
    .create({ ...asked, max_completion_tokens: CERTAIN, n: 2 })
    .withResponse();
  assert.equal(response.headers.get("content-type"), "application/json");
  assert.deepEqual(data.choices.map((choice) => choice.index), [0, 1]);
  const [one, other] = data.choices;
  assert.equal(one.finish_reason, "length");
  assert.equal(one.message.role, "assistant");
  assert.ok(one.message.content);
  assert.equal(one.message.content, other.message.content);
  assert.equal(data.usage.completion_tokens, 2 * CERTAIN);
  assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens);
});

test("a stream is the answer in pieces, and ends with its usage", async () => {
  const whole = await sdk.chat.completions.create({ ...asked, max_tokens: CERTAIN });
  const stream = await sdk.chat.completions.create({
    ...asked,
    max_tokens: CERTAIN,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = await collect(stream);
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, CERTAIN);
  assert.equal(last.usage.prompt_tokens, whole.usage.prompt_tokens);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.ok(chunks.every((chunk) => chunk.id === last.id && chunk.usage === null));
  const told = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
  assert.equal(told, whole.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
});

test("the SDK's own reading of a stream joins it to a completion", async () => {
  const deltas = [];
  const stream = sdk.chat.completions
    .stream({ ...asked, max_tokens: 24, stop: "(", logprobs: true })
    .on("content", (delta) => deltas.push(delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].finish_reason, "stop");
  assert.equal(deltas.join(""), final.choices[0].message.content);
  const joined = final.choices[0].logprobs.content.map((entry) => entry.token).join("");
  assert.ok(joined.startsWith(final.choices[0].message.content));
});

test("an answer of a schema is an object of it", async () => {
  const response_format = {
    type: "json_schema",
    json_schema: { name: "colour", strict: true, schema: COLOUR },
  };
  const told = await sdk.chat.completions.parse({ ...asked, response_format, max_tokens: 64 });
  const { parsed } = told.choices[0].message;
  assert.deepEqual(Object.keys(parsed), ["name", "parts"]);
  assert.ok(["red", "green"].includes(parsed.name));
  assert.ok(parsed.parts.length === 2 && parsed.parts.every(Number.isInteger));
});

test("a conversation goes on", async () => {
  const first = await sdk.chat.completions.create({ ...asked, max_tokens: 16 });
  const more = await sdk.chat.completions.create({
    ...asked,
    max_tokens: CERTAIN,
    messages: [
      { role: "system", content: "You write Python." },
      ...asked.messages,
      first.choices[0].message,
      { role: "user", content: [{ type: "text", text: "And one that subtracts them" }] },
    ],
  });
  assert.ok(more.usage.prompt_tokens > first.usage.prompt_tokens);
  assert.equal(more.usage.completion_tokens, CERTAIN);
});

test("a stream that is left frees its slot", async () => {
  const stream = await sdk.chat.completions.create({ ...endless, stream: true });
  await collect(stream, 3); // to break off a loop over it is to leave it
  assert.ok(stream.controller.signal.aborted);
  await untilBusy(0);
});

test("a stream that is aborted frees its slot", async () => {
  const stream = await sdk.chat.completions.create({ ...endless, stream: true });
  let chunks = 0;
  for await (const _chunk of stream) {
    chunks += 1;
    if (chunks === 2) {
      await untilBusy(1);
      stream.controller.abort();
    }
  }
  assert.ok(chunks >= 2);
  await untilBusy(0);
});

test("an answer that nobody waits for any more frees its slot", async () => {
  const controller = new AbortController();
  const answer = sdk.chat.completions.create(endless, { signal: controller.signal });
  const refused = assert.rejects(answer, APIUserAbortError);
  await untilBusy(1);
  controller.abort();
  await refused;
  await untilBusy(0);
  assert.ok((await sdk.chat.completions.create({ ...asked, max_tokens: 2 })).choices.length);
});
