"""`--compare`: the same request decoded plainly as well, and trees held against chains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.answer import first_difference

from .answer import Ask, answer, write_nothing
from .report import Say, drafts_text

if TYPE_CHECKING:
    from dflash_local import Model, Result


def compare(
    model: Model, ask: Ask, result: Result, width: int | str | None, say: Say
) -> dict[str, Any] | None:
    """Ask again, without drafts, and where they were trees with chains; the same seed, and no cache
    of the first time to start from. `width` is what was asked for. Says a line of each, and returns
    what `--json` prints of it; None if Ctrl-C ended it."""
    plain = _again(model, ask, result, draft_width=0)
    if plain.finish_reason == "cancelled":
        return None
    told = _against(result, plain)
    say(_line("plain decoding", "drafting", told))
    told["chain"] = None
    if result.stats.tree_rounds:
        block = model.engine.max_width
        options = {"draft_width": min(width, block)} if isinstance(width, int) else {}
        chain = _again(model, ask, result, draft_shape="chain", **options)
        if chain.finish_reason == "cancelled":
            return None
        told["chain"] = _against(result, chain) | {"drafts": Acceptance.of([chain.stats]).as_dict()}
        say(_line("chains", "drafting trees", told["chain"]))
        say(f"trees: {drafts_text(result.stats)}")
        say(f"chains: {drafts_text(chain.stats)}")
    if result.stats.drafting:
        say(result.stats.drafting)
    return told


def _again(model: Model, ask: Ask, first: Result, **options: Any) -> Result:
    model.forget()
    return answer(partial(ask, seed=first.seed, **options), write_nothing)


def _against(result: Result, other: Result) -> dict[str, Any]:
    """By decode speed in tokens/s."""
    speed = other.stats.tokens_per_second
    return {
        "tokens_per_second": speed,
        "ratio": result.stats.tokens_per_second / speed if speed else None,
        "equal": result.tokens == other.tokens,
        "first_difference": first_difference(result.tokens, other.tokens),
    }


def _line(other: str, asked: str, compared: Mapping[str, Any]) -> str:
    """`other` and `asked` are the two ways, in words."""
    ratio = compared["ratio"]
    faster = "" if ratio is None else f"{asked} is {ratio:.2f} times as fast"
    same = (
        "the same tokens"
        if compared["equal"]
        else f"tokens part at number {compared['first_difference'] + 1}"
    )
    head = f"{other}: {compared['tokens_per_second']:.1f} tokens/s"
    return "; ".join(part for part in (head, faster, same) if part)
