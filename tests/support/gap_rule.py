"""Two greedy answers may part where batched kernels round otherwise than one-token steps, but only
if the target is undecided.

The gap rule: at the first token that differs from plain decoding, the two likeliest logits of the
plain run must be closer than rounding can bring them: twice the measured noise, as each of the two
may move by that much.

In a mixture of experts rounding may choose another expert, and then a logit moves by far more than
in rows of other texts. There the noise is that of the row itself: what it differs by when the same
text is decoded at the other width. It bounds the gap by definition: if two ways of decoding choose
different tokens, one of the two logits has moved by half the gap at least.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.sampling.params import TokenLogprob
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import Target


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one too; None for equal answers."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


def top_two_gap(logprob: TokenLogprob) -> float:
    """The lead of the likeliest logit over the second; needs `logprobs=2`."""
    (_, first), (_, second) = logprob.top[:2]
    return first - second


def equal_by_gap_rule(
    plain: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    other: Sequence[int],
    noise: float | Callable[[], float],
    row_noise: Callable[[int], float] | None = None,
) -> bool:
    """Whether two greedy answers are equal. Fails where they part although they must not.

    `logprobs` are those of the plain run, asked for with `logprobs=2`; `noise` is the largest
    difference of a logit between the two ways of decoding, or measures that where answers part.
    `row_noise` gives that of the row which
    draws the n-th token, for a mixture of experts.
    """
    at = first_difference(plain, other)
    if at is None:
        return True
    assert at < len(plain), "the other answer goes on after the plain one has ended"
    gap = top_two_gap(logprobs[at])
    noise = noise() if callable(noise) else noise
    if gap > 2 * noise and row_noise is not None:
        noise = row_noise(at)
    assert gap <= 2 * noise, (
        f"answers part at token {at}, where the likeliest logit leads by {gap:.3g}; "
        f"the largest rounding difference is {noise:.3g}"
    )
    return False


def noise_of_row(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], at: int, widths: Sequence[int]
) -> float:
    """Largest difference of a logit in the row that draws `tokens[at]`, between steps of one token
    and passes of these widths over the answer so far."""
    begin, text = len(prompt) - 1, [*prompt, *tokens[:at]]
    single = step_logits(target, text, begin)[-1]
    wide = [joint_logits(target, [text], begin, [width])[0][-1] for width in widths]
    return max(float(np.abs(row - single).max()) for row in wide)


def step_logits(target: Target, tokens: Sequence[int], begin: int) -> NDArray[np.float32]:
    """Logits after `tokens[begin:]`, decoded one by one in sequence 0 after the rest in one batch;
    float32 [n, n_vocab]. Nothing else is in the cache."""
    _prefill(target, [tokens], begin)
    rows = []
    for at in range(begin, len(tokens)):
        target.decode([tokens[at]], [at], [0], [True])
        rows.append(target.logits(0).copy())
    target.clear(0)
    return np.stack(rows)


def joint_logits(
    target: Target, texts: Sequence[Sequence[int]], begin: int, widths: Sequence[int]
) -> list[NDArray[np.float32]]:
    """The same of several texts at once, text s in steps of `widths[s]` rows in sequence s."""
    _prefill(target, texts, begin)
    done = [begin] * len(texts)
    rows: list[list[NDArray[np.float32]]] = [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        batch = [
            (s, at)
            for s, text in enumerate(texts)
            for at in range(done[s], min(done[s] + widths[s], len(text)))
        ]
        target.decode(
            [texts[s][at] for s, at in batch],
            [at for _, at in batch],
            [s for s, _ in batch],
            [True] * len(batch),
        )
        for row, (s, at) in enumerate(batch):
            rows[s].append(target.logits(row).copy())
            done[s] = at + 1
    for s in range(len(texts)):
        target.clear(s)
    return [np.stack(r) for r in rows]


def forked_logits(
    target: Target, tokens: Sequence[int], begin: int, depth: int
) -> NDArray[np.float32]:
    """The same in trees of sequence 0, `depth` tokens deep, each beside a wrong one that comes
    first: their cells lie in another order than those of plain decoding."""
    _prefill(target, [tokens], begin)
    rows = []
    for first in range(begin, len(tokens), depth + 1):
        right = list(tokens[first : first + depth + 1])
        nodes, parents, path = [], [], [0]
        for token in right[1:]:
            nodes += [(token + 1) % target.n_vocab, token]
            parents += [path[-1] - 1] * 2
            path.append(len(nodes))
        batch = Batch()
        part = batch.add_tree(0, first, right[0], nodes, parents)
        target.run(batch)
        rows += [target.logits(row).copy() for row in path]
        target.keep(part, path)
    target.clear(0)
    return np.stack(rows)


def largest_difference(
    ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]]
) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def joint_noise(
    target: Target,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    widths: Sequence[int],
) -> float:
    """Largest difference of a logit along plain answers, between steps of each sequence alone and
    of all together, `widths[s]` rows of sequence s at a time, and some other numbers of rows."""
    begin = min(map(len, prompts)) - 1
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, answers, strict=True)]
    single = [step_logits(target, text, begin) for text in texts]
    steps = [max(width, 1) for width in widths], [1] * len(texts), [3] * len(texts)
    return max(largest_difference(single, joint_logits(target, texts, begin, s)) for s in steps)


def _prefill(target: Target, texts: Sequence[Sequence[int]], begin: int) -> None:
    for s, text in enumerate(texts):
        target.clear(s)
        for first in range(0, begin, target.n_batch):
            chunk = text[first : min(begin, first + target.n_batch)]
            n = len(chunk)
            target.decode(chunk, range(first, first + n), [s] * n, [False] * n)
