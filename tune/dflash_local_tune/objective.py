"""The objective of a drafter: whole blocks at random anchors of the target's own answers.

Anchors and blocks are those of DFlash (arXiv 2602.06036, section 4.2). The label of a position is
the token that the target's sampler draws there. Its weight follows D-PACE (arXiv 2605.18810): the
gradient of the expected accepted length, as the drafter's own chances have it now. The Markov and
confidence heads of DSpark, and the selector of DFlash 2, see the true token before each position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from dflash_local_tune.answers import Answer, moved
from dflash_local_tune.drafter import TorchDrafter

_SMOOTHING = 0.5
"""D-PACE's alpha: with 0, positions after an uncertain one would learn nothing."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of answers and their labels: A blocks of n_draft positions.

    `before` is the true token before each position, `tokens` the true token, both int64
    [A, n_draft]; `label_ids` and `label_probs`, [A, n_draft, k], the target's distribution.
    `valid` is False beyond the answer's end, and for a block that only fills up.
    """

    anchors: Tensor
    starts: Tensor
    before: Tensor
    tokens: Tensor
    label_ids: Tensor
    label_probs: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Outcome:
    """`loss`, [S]: of each answer, to be minimised. `accepted`, [S, A]: the tokens that a greedy
    round would emit at each anchor, where the target's answer is given."""

    loss: Tensor
    accepted: Tensor


def random_anchors(answer: Answer, n: int, generator: torch.Generator) -> Tensor:
    """At most `n` different positions of anchors, int64 [n]. An anchor is any token of the answer
    but the last; up to half of them are those of the engine's rounds, which begin where drafts
    failed and so are harder than others."""
    first, end = answer.n_prompt, len(answer.tokens) - 1
    if not len(answer.rounds):
        return first + torch.randperm(end - first, generator=generator)[:n]
    began = answer.rounds[torch.randperm(len(answer.rounds), generator=generator)[: n // 2]]
    others = first + torch.randperm(end - first, generator=generator)
    return torch.cat([began, others[~torch.isin(others, began)]])[:n]


def all_anchors(answer: Answer) -> Tensor:
    """The positions of all tokens that can be an anchor."""
    return torch.arange(answer.n_prompt, len(answer.tokens) - 1)


def n_rounds(accepted: Sequence[int]) -> int:
    """The rounds of an answer, given the tokens that a round would emit at each of its anchors."""
    at = n = 0
    while at < len(accepted):
        at += accepted[at]
        n += 1
    return n


def blocks_at(
    answers: Sequence[Answer],
    starts: Sequence[Tensor],
    n_draft: int,
    device: torch.device,
    n_anchors: int = 0,
) -> Blocks:
    """The blocks of answers whose anchors are at these positions of each, on a device. Of each
    answer equally many, `n_anchors` at least: the fewer ones are filled up with blocks of which
    nothing is valid."""
    at = pad_sequence(list(starts), batch_first=True)
    at = functional.pad(at, (0, max(0, n_anchors - at.shape[1])))
    is_real = torch.arange(at.shape[1]) < torch.tensor([len(each) for each in starts])[:, None]
    n_tokens = torch.tensor([len(each.tokens) for each in answers])
    n_labels = torch.tensor([len(each.label_ids) for each in answers])
    n_prompt = torch.tensor([each.n_prompt for each in answers])[:, None, None]
    # Tokens and labels of all answers lie one behind the other.
    begin, label_begin = ((n.cumsum(0) - n)[:, None, None] for n in (n_tokens, n_labels))
    last = n_tokens[:, None, None] - 1
    places = at[..., None] + 1 + torch.arange(n_draft)
    valid = (places <= last) & is_real[..., None]
    places = places.clamp(max=last)
    rows = (places - n_prompt).clamp(min=0) + label_begin
    tokens = torch.cat([each.tokens for each in answers])
    label_ids = torch.cat([each.label_ids for each in answers])
    label_probs = torch.cat([each.label_probs for each in answers])
    rows = moved(rows.flatten(0, 1), label_ids.device)
    found = Blocks(
        anchors=tokens[at + begin[..., 0]].flatten(),
        starts=at.flatten(),
        before=tokens[places + begin - 1].flatten(0, 1),
        tokens=tokens[places + begin].flatten(0, 1),
        label_ids=label_ids[rows],
        label_probs=label_probs[rows],
        valid=valid.flatten(0, 1),
    )
    return Blocks(**{name: moved(value, device) for name, value in vars(found).items()})


def outcome(
    drafter: TorchDrafter,
    answers: Sequence[Answer],
    starts: Sequence[Tensor],
    *,
    n_rows: int = 0,
    n_anchors: int = 0,
    sharper: bool = False,
    of: Callable[[TorchDrafter, Tensor, Blocks, int], tuple[Tensor, Tensor]] | None = None,
) -> Outcome:
    """The drafter's results on the blocks at these anchors of each answer, in one pass. For steps
    of equal shapes there are `n_rows` context rows and `n_anchors` blocks of each answer at least.
    `sharper`: the labels' chances are squared. `of`: `losses`, compiled."""
    device = drafter.head.device
    n_draft = drafter.block_size - drafter.first_draft
    blocks = blocks_at(answers, starts, n_draft, device, n_anchors)
    if sharper:  # what is likely counts for more
        probs = blocks.label_probs.square()
        blocks = replace(blocks, label_probs=probs / probs.sum(dim=-1, keepdim=True))
    n_read = max(int(at.max()) for at in starts)
    features = pad_sequence([each.features[:n_read] for each in answers], batch_first=True)
    features = functional.pad(features, (0, 0, 0, max(0, n_rows - features.shape[1])))
    return Outcome(*(of or losses)(drafter, features.to(device), blocks, len(answers)))


def losses(
    drafter: TorchDrafter, features: Tensor, blocks: Blocks, n: int
) -> tuple[Tensor, Tensor]:
    """The fields of an `Outcome` for the blocks of `n` answers with these features, [n, T,
    n_features]."""
    context = drafter.inject(features)
    hidden = drafter.hidden(context, blocks.anchors, blocks.starts)[:, drafter.first_draft :]
    logits = drafter.logits(hidden)
    if drafter.family == "dspark":
        logits = logits + drafter.markov(blocks.before)
    logits = drafter.scaled(logits).float()
    logprobs = logits.log_softmax(dim=-1)
    best = logits.argmax(dim=-1)
    # A token that the drafter's own vocabulary lacks has no chance, and nothing can be done.
    own = logprobs.gather(-1, blocks.label_ids).clamp(min=-50)
    errors = -(blocks.label_probs * own).sum(dim=-1)
    if drafter.family == "dflash2":
        ids, scores = drafter.select(hidden, logits, blocks.before)
        best = ids.gather(-1, scores.argmax(dim=-1, keepdim=True))[..., 0]
        errors = errors + _selector_errors(ids, scores, blocks)
    true = logprobs.gather(-1, blocks.tokens[..., None])[..., 0]
    weights = position_weights(true.detach().exp(), blocks.valid)
    loss = _means(errors, weights, n)
    if drafter.family == "dspark":
        loss = loss + _confidence_loss(drafter, hidden, blocks, best, n)
    hits = (best == blocks.tokens) & blocks.valid
    accepted = 1 + hits.long().cumprod(dim=-1).sum(dim=-1)
    return loss, accepted.reshape(n, -1)


def position_weights(chances: Tensor, valid: Tensor) -> Tensor:
    """The weight of each position, [A, n], by the drafter's chances of the true tokens, [A, n].

    With chances q the expected length is the sum over k of q_1 ... q_k. Its gradient by log q_j is
    the sum of these products from k = j on.
    """
    smooth = _SMOOTHING + (1 - _SMOOTHING) * chances
    reached = (smooth * valid).cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * valid


def _selector_errors(ids: Tensor, scores: Tensor, blocks: Blocks) -> Tensor:
    """Cross-entropy [A, n_draft] of the selector's choice, with those labels that are candidates;
    0 if none is."""
    same = ids[..., :, None] == blocks.label_ids[..., None, :]
    labels = (same * blocks.label_probs[..., None, :]).sum(dim=-1)
    labels = labels / labels.sum(dim=-1, keepdim=True).clamp(min=1e-6)
    return -(labels * scores.float().log_softmax(dim=-1)).sum(dim=-1)


def _confidence_loss(
    drafter: TorchDrafter, hidden: Tensor, blocks: Blocks, best: Tensor, n: int
) -> Tensor:
    """The confidence head learns the chance that the target draws the drafted token; [n], by
    answer. The hidden states learn nothing from it: they are for drafting."""
    found = drafter.confidence(hidden.detach(), blocks.before)
    if found is None:
        return hidden.new_zeros(n)
    chances = ((blocks.label_ids == best[..., None]) * blocks.label_probs).sum(dim=-1)
    errors = functional.binary_cross_entropy_with_logits(
        found.float(), chances.float(), reduction="none"
    )
    return _means(errors, blocks.valid, n)


def _means(errors: Tensor, weights: Tensor, n: int) -> Tensor:
    """The weighted mean of each of `n` answers, [n], over its blocks."""
    sums = (weights * errors).reshape(n, -1).sum(dim=-1)
    return sums / weights.reshape(n, -1).sum(dim=-1)
