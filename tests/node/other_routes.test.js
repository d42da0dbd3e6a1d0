import assert from "node:assert/strict";
import { test } from "node:test";

import { BadRequestError, NotFoundError, OpenAI } from "openai";

import { CERTAIN, MODEL, collect, connect, url, user } from "./served.js";

const sdk = connect();
const PROMPT = "a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12";
const asked = { model: MODEL, prompt: PROMPT, max_tokens: CERTAIN, temperature: 0 };

/** The error of a request that is refused, which the SDK must have read from the answer's body. */
async function refusal(request, kind, status, type = "invalid_request_error") {
  const error = await request.then(() => assert.fail("it was not refused"), (caught) => caught);
  assert.ok(error instanceof kind, String(error));
  assert.equal(error.status, status);
  assert.equal(error.type, type);
  assert.ok(error.error.message && !error.error.message.includes("\n"));
  return error;
}

test("completions of several prompts", async () => {
  const told = await sdk.completions.create({ ...asked, prompt: [PROMPT, "import"], logprobs: 2 });
  assert.deepEqual(told.choices.map((choice) => choice.index), [0, 1]);
  assert.equal(told.choices[0].logprobs.tokens.length, CERTAIN);
});

test("a stream of a completion", async () => {
  const whole = await sdk.completions.create(asked);
  const stream_options = { include_usage: true };
  const chunks = await collect(
    await sdk.completions.create({ ...asked, stream: true, stream_options }),
  );
  assert.equal(chunks.pop().usage.completion_tokens, CERTAIN);
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
});

test("the models", async () => {
  const [served, ...others] = await collect(sdk.models.list());
  assert.deepEqual(others, []);
  assert.equal(served.object, "model");
  assert.deepEqual(await sdk.models.retrieve(served.id), served);
  await refusal(sdk.models.retrieve("another"), NotFoundError, 404);
});

test("requests that are wrong", async () => {
  const chat = (more) => sdk.chat.completions.create({ model: MODEL, messages: user("hi"), ...more });
  const hot = await refusal(chat({ temperature: -1 }), BadRequestError, 400);
  assert.equal(hot.param, "temperature");
  const none = await refusal(chat({ messages: [] }), BadRequestError, 400);
  assert.equal(none.param, "messages");
  const streamed = await refusal(chat({ max_tokens: -5, stream: true }), BadRequestError, 400);
  assert.equal(streamed.param, "max_tokens");
  const beyond = chat({ messages: user("a b c d ".repeat(9000)) });
  const long = await refusal(beyond, BadRequestError, 400, "exceed_context_size_error");
  assert.equal(long.code, "context_length_exceeded");
});

test("what the SDK tells of itself in headers is no hindrance", async () => {
  const more = new OpenAI({
    baseURL: `${url}/v1/`,
    apiKey: "unused",
    organization: "org",
    project: "project",
    timeout: 60_000,
    maxRetries: 2,
  });
  assert.equal((await more.models.list()).data.length, 1);
});
