// The servers that the tests talk to; conftest.py starts them and names them.

import assert from "node:assert/strict";

import OpenAI from "openai";

export const MODEL = "any-name";
export const QUESTION = "Write a function that adds two numbers";
/** So many tokens of the answer to that question are certain, whoever else is answered with it. */
export const CERTAIN = 4;

/** The shipped pair, and the same target with Qwen3's chat template, which has tools. */
export const url = process.env.DFLASH_LOCAL_URL;
export const toolUrl = process.env.DFLASH_LOCAL_TOOL_URL;

export const connect = (to = url) =>
  new OpenAI({ baseURL: `${to}/v1`, apiKey: "unused", maxRetries: 0 });

export const user = (content) => [{ role: "user", content }];

/** What has come of a stream so far, or all of it. */
export async function collect(stream, atMost = Infinity) {
  const items = [];
  for await (const item of stream) {
    items.push(item);
    if (items.length >= atMost) break;
  }
  return items;
}

const busy = async () => {
  const slots = await (await fetch(`${url}/slots`)).json();
  return slots.filter((slot) => slot.is_processing).length;
};

/** Wait until `n` of the server's slots are at work. */
export async function untilBusy(n) {
  const end = Date.now() + 60_000;
  while ((await busy()) !== n) {
    assert.ok(Date.now() < end, `there were never ${n} slots at work`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
