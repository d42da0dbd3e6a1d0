"""Three answers at once on an event loop, each printed when it is whole.

python examples/streaming.py
"""

from __future__ import annotations

import asyncio

import dflash_local

TOPICS = ("the sea", "a clock", "bread")


async def answer(model: dflash_local.Model, topic: str) -> str:
    messages = [{"role": "user", "content": f"Write two sentences about {topic}."}]
    parts = []
    async for chunk in model.astream_chat(messages, max_tokens=64):
        parts.append(chunk.text)  # arrives round by round, several tokens at a time
    return "".join(parts)


async def main() -> None:
    # One target batch and one draft graph serve up to `n_seq` answers.
    with dflash_local.load("smollm2-135m", n_seq=len(TOPICS), quiet=True) as model:
        for text in asyncio.as_completed([answer(model, topic) for topic in TOPICS]):
            print(await text, end="\n\n")


if __name__ == "__main__":
    asyncio.run(main())
