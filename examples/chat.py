"""A conversation of two turns. The second one decodes only what is new.

python examples/chat.py
"""

from __future__ import annotations

import dflash_local


def main() -> None:
    # or load("target.gguf", "drafter.gguf")
    with dflash_local.load("smollm2-135m", quiet=True) as model:
        messages = [{"role": "user", "content": "How do plants make their food?"}]
        first = model.chat(messages, max_tokens=64)
        print(first.text)

        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Say it in one sentence."},
        ]
        second = model.chat(messages, max_tokens=64)
        print(second.text)
        stats = second.stats
        print(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were at hand")


if __name__ == "__main__":
    main()
