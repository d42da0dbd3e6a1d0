import assert from "node:assert/strict";
import { test } from "node:test";

import { CERTAIN, MODEL, QUESTION, collect, connect, toolUrl } from "./served.js";

const sdk = connect();
const asked = { model: MODEL, input: QUESTION, temperature: 0, store: false };

test("a response", async () => {
  const told = await sdk.responses.create({
    ...asked,
    instructions: "You write Python.",
    max_output_tokens: CERTAIN,
  });
  assert.equal(told.status, "incomplete");
  assert.equal(told.incomplete_details.reason, "max_output_tokens");
  assert.equal(told.output[0].type, "message");
  assert.equal(told.output_text, told.output[0].content[0].text);
  assert.ok(told.output_text);
  assert.equal(told.usage.output_tokens, CERTAIN);
});

test("a stream of it is the same in events", async () => {
  const whole = await sdk.responses.create({ ...asked, max_output_tokens: CERTAIN });
  const events = await collect(
    await sdk.responses.create({ ...asked, max_output_tokens: CERTAIN, stream: true }),
  );
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.incomplete");
  assert.equal(events.at(-1).response.usage.output_tokens, CERTAIN);
});

test("the SDK's own reading of a stream", async () => {
  const format = {
    type: "json_schema",
    name: "answer",
    schema: {
      type: "object",
      properties: { yes: { type: "boolean" } },
      required: ["yes"],
      additionalProperties: false,
    },
  };
  const final = await sdk.responses.stream({ ...asked, text: { format } }).finalResponse();
  assert.equal(final.status, "completed");
  assert.equal(typeof final.output_parsed.yes, "boolean");
});

test("a function is called, and its result is answered", async () => {
  const tooled = connect(toolUrl);
  const tools = [
    {
      type: "function",
      name: "read_file",
      parameters: {
        type: "object",
        properties: { path: { type: "string", maxLength: 12 } },
        required: ["path"],
        additionalProperties: false,
      },
      strict: true,
    },
  ];
  const events = await collect(
    await tooled.responses.create({ ...asked, tools, tool_choice: "required", stream: true }),
  );
  const kinds = events.map((event) => event.type);
  assert.ok(kinds.includes("response.function_call_arguments.delta"));
  const { output } = events.at(-1).response;
  const call = output.find((item) => item.type === "function_call");
  assert.equal(call.name, "read_file");
  assert.equal(typeof JSON.parse(call.arguments).path, "string");
  const result = { type: "function_call_output", call_id: call.call_id, output: "x = 1" };
  const input = [{ role: "user", content: QUESTION }, ...output, result];
  const more = await tooled.responses.create({
    ...asked,
    input,
    tools,
    tool_choice: "none",
    max_output_tokens: CERTAIN,
  });
  assert.equal(more.usage.output_tokens, CERTAIN);
});
