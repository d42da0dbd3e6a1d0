import assert from "node:assert/strict";
import { test } from "node:test";

import { MODEL, collect, connect, toolUrl, user } from "./served.js";

const sdk = connect(toolUrl);
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: {
      type: "object",
      properties: {
        city: { type: "string", maxLength: 12 },
        days: { type: "integer", minimum: 1, maximum: 9 },
      },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const NOW = { type: "function", function: { name: "now" } };
const asked = {
  model: MODEL,
  messages: user("What is the weather?"),
  tools: [WEATHER, NOW],
  tool_choice: { type: "function", function: { name: "get_weather" } },
  parallel_tool_calls: false,
  max_tokens: 96,
  temperature: 0,
};

test("a tool is called, and its result is answered", async () => {
  const told = await sdk.chat.completions.create(asked);
  const { message, finish_reason } = told.choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.content, null);
  const [call] = message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  const again = await sdk.chat.completions.create({
    ...asked,
    messages: [
      ...asked.messages,
      message,
      { role: "tool", tool_call_id: call.id, content: "sunny" },
    ],
    tool_choice: "auto",
    max_tokens: 4,
  });
  assert.equal(again.choices[0].message.role, "assistant");
  assert.ok(again.usage.prompt_tokens > told.usage.prompt_tokens);
});

test("a call streams in fragments: its name first, then its arguments", async () => {
  const chunks = await collect(await sdk.chat.completions.create({ ...asked, stream: true }));
  const deltas = chunks.flatMap((chunk) => chunk.choices[0]?.delta.tool_calls ?? []);
  const [first, ...rest] = deltas;
  assert.equal(first.type, "function");
  assert.equal(first.function.name, "get_weather");
  assert.ok(first.id);
  assert.ok(rest.length > 1);
  assert.ok(rest.every((delta) => delta.index === 0 && !delta.id && !delta.function.name));
  const given = deltas.map((delta) => delta.function.arguments ?? "").join("");
  assert.equal(typeof JSON.parse(given).city, "string");
  assert.equal(chunks.at(-1).choices[0].finish_reason, "tool_calls");
});

test("the SDK's own reading of such a stream", async () => {
  const done = [];
  const stream = sdk.chat.completions
    .stream({ ...asked, tool_choice: "required" })
    .on("tool_calls.function.arguments.done", (call) => done.push(call));
  const final = await stream.finalChatCompletion();
  const [call] = final.choices[0].message.tool_calls;
  assert.deepEqual(done.map(({ name }) => name), [call.function.name]);
  assert.equal(done[0].arguments, call.function.arguments);
});

test("the SDK runs the tool that is called", async () => {
  const cities = [];
  const weather = {
    type: "function",
    function: {
      ...WEATHER.function,
      parse: JSON.parse,
      function: ({ city }) => {
        cities.push(city);
        return "sunny";
      },
    },
  };
  // To call one tool only is, to the SDK, to be done with its result.
  const runner = sdk.chat.completions.runTools({ ...asked, tools: [weather] });
  assert.equal(await runner.finalFunctionToolCallResult(), "sunny");
  assert.equal(cities.length, 1);
  assert.equal(typeof cities[0], "string");
});
