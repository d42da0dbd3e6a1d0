"""Three answers at once on an event loop, each printed when it is whole.

python examples/streaming.py
"""

from __future__ import annotations

import asyncio

import dflash_local

NAMES = ("read_json", "is_prime", "reverse_words")


async def answer(model: dflash_local.Model, name: str) -> str:
    messages = [{"role": "user", "content": f"Implement `{name}` in Python."}]
    parts = []
    async for chunk in model.astream_chat(messages, max_tokens=64):
        parts.append(chunk.text)  # arrives round by round, several tokens at a time
    return "".join(parts)


async def main() -> None:
    target, drafter = dflash_local.demo.pair()
    # One target batch and one draft graph serve up to `n_seq` answers.
    with dflash_local.load(target, drafter, n_seq=len(NAMES), quiet=True) as model:
        for text in asyncio.as_completed([answer(model, name) for name in NAMES]):
            print(await text, end="\n\n")


if __name__ == "__main__":
    asyncio.run(main())
