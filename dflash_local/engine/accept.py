"""Sample and match: which drafted tokens the target itself would have emitted.

It knows nothing about models, caches or text. `sample` is called once per emitted token, in order.
So a seeded run emits exactly the tokens of plain decoding, also with penalties and grammars. If
drafts do not depend on the sampler's random generator, answers have the same distribution, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dflash_local.draft.draft import ANCHOR, Draft


@dataclass(frozen=True)
class Verdict:
    """The result of one verify pass.

    `tokens` are emitted, in order. `path` are the verified rows to keep: row 0 is the anchor, row i
    + 1 is draft node i. Always `len(tokens) == len(path)`: each kept row gave one token, and
    `tokens[i]` is that of row `path[i + 1]`. The last token is in no row: it was never fed to the
    target, and is the next anchor if generation goes on.
    """

    tokens: list[int]
    path: list[int]


def accept(draft: Draft, sample: Callable[[int], int], emit: Callable[[int], bool]) -> Verdict:
    """Walk from the anchor along the tokens that the target draws.

    `sample(row)` draws the target's token from the logits of that row. `emit(token)` takes it, and
    says whether the answer ends with it. Each is called once per emitted token. Their errors pass
    through.
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
        if emit(token):
            break
        # Accept rule: a draft is kept if and only if it equals the token that the target drew
        # after the same prefix. That token is emitted either way, so a rejection costs no token.
        node = children.get((node, token))
    return Verdict(tokens, path)
