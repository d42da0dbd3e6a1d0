"""A conversation of two turns. The second one decodes only what is new.

python examples/chat.py
"""

from __future__ import annotations

import dflash_local


def main() -> None:
    target, drafter = dflash_local.demo.pair()  # or the paths of your own GGUF files
    with dflash_local.load(target, drafter, quiet=True) as model:
        messages = [{"role": "user", "content": "Implement `add`: Return the sum of two numbers."}]
        first = model.chat(messages, max_tokens=64)
        print(first.text)

        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Implement `mul`: Return the product of two numbers."},
        ]
        second = model.chat(messages, max_tokens=64)
        print(second.text)
        stats = second.stats
        print(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens were at hand")


if __name__ == "__main__":
    main()
