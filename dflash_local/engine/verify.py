"""Sample and match: which drafted tokens the target itself would have emitted.

Knows nothing of models, caches or text. For drafts that do not depend on the random generator this
has the law of plain decoding, and as `sample` is called once per emitted token and in their order,
a seeded run emits the very tokens of plain decoding, with penalties and grammars too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_local.draft.draft import ANCHOR, Draft


@dataclass(frozen=True)
class Verdict:
    """What one verify pass yields.

    `tokens` are emitted, in order. `path` are the verified rows to keep: row 0 is the anchor, row
    i + 1 is draft node i. Always `len(tokens) == len(path)`: each kept row gave one token, and
    `tokens[i]` is what row `path[i + 1]` holds. The last token is in no row, finished or not: it
    was never fed to the target, and is the next anchor if generation goes on.
    """

    tokens: list[int]
    path: list[int]


def verify(draft: Draft, sample: Callable[[int], int], stop: Callable[[int], bool]) -> Verdict:
    """Walk from the anchor along the tokens that the target draws.

    `sample(row)` draws the target's token from the logits of that row, exactly once per emitted
    token. `stop(token)`, also called once per token, says that generation ends with it. What
    either raises passes through.
    """
    children: dict[tuple[int, int], int] = {}
    for child, edge in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        children.setdefault(edge, child)  # of equal siblings the first one counts

    tokens: list[int] = []
    path: list[int] = []
    node: int | None = ANCHOR
    while node is not None:
        row = node + 1
        path.append(row)
        token = sample(row)
        tokens.append(token)
        if stop(token):
            break
        # Accept rule: a draft is kept if and only if it equals the token that the target drew
        # after the same prefix. That token is emitted either way, so a rejection costs no token.
        node = children.get((node, token))
    return Verdict(tokens, path)
