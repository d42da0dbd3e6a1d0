"""`--compare`: decodes the same request without drafts, and compares trees with chains."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dflash_local import Model, Result
from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.speed import first_difference

from .answer import Ask, answer
from .report import drafts_text
from .terminal import Speaker

_ONE_PROMPT = "one prompt is no verdict: `dflash-local bench` measures many, each in turns"


def compare(
    model: Model, ask: Ask, result: Result, width: int | str | None, say: Speaker
) -> dict[str, Any] | None:
    """Ask again with and without drafts, and with chains if the drafts were trees. Report them.

    The seed is that of `result`, and nothing is reused from its caches. Its own speed does not
    count: it was printed as it came, and the first drafts of a new drafter are there to be judged.
    `width` is the draft width that the user asked for. Returns the `--json` object of the
    comparison, None if Ctrl-C ended it.
    """
    result = _again(model, ask, result)
    if result.finish_reason == "cancelled":
        return None
    plain = _again(model, ask, result, draft_width=0)
    if plain.finish_reason == "cancelled":
        return None
    report = _comparison(result, plain)
    told = _line("plain decoding", "drafting", report)
    say(f"asked again: {result.stats.tokens_per_second:.1f} tokens/s; {told}")
    report["chain"] = None
    if result.stats.tree_rounds:
        block = model.engine.max_width
        options = {"draft_width": min(width, block)} if isinstance(width, int) else {}
        chain = _again(model, ask, result, draft_shape="chain", **options)
        if chain.finish_reason == "cancelled":
            return None
        drafts = Acceptance.of([chain.stats]).as_dict()
        report["chain"] = _comparison(result, chain) | {"drafts": drafts}
        say(_line("chains", "drafting trees", report["chain"]))
        say(f"trees: {drafts_text(result.stats)}")
        say(f"chains: {drafts_text(chain.stats)}")
    if result.stats.drafting and not result.stats.drafted:
        say(result.stats.drafting)
    say(_ONE_PROMPT)
    return report


def _again(model: Model, ask: Ask, first: Result, **options: Any) -> Result:
    model.forget()
    return answer(partial(ask, seed=first.seed, **options))


def _comparison(result: Result, other: Result) -> dict[str, Any]:
    """The speed of `result` beside that of `other`, in tokens/s; whether their tokens are equal."""
    speed = other.stats.tokens_per_second
    return {
        "tokens_per_second": speed,
        "ratio": result.stats.tokens_per_second / speed if speed else None,
        "equal": result.tokens == other.tokens,
        "first_difference": first_difference(result.tokens, other.tokens),
        "drafted": result.stats.drafted > 0,
        "gained_by": result.stats.gained_by,
    }


def _line(other: str, asked: str, compared: Mapping[str, Any]) -> str:
    """The comparison in words; `other` and `asked` name the two ways to decode."""
    ratio = compared["ratio"]
    faster = "" if ratio is None else f"{asked} was {ratio:.2f} times as fast on this prompt"
    if faster and compared["gained_by"] and other == "plain decoding":
        faster += f", {compared['gained_by']}"
    if not compared["drafted"]:
        faster = "nothing was drafted on this prompt"
    parted = compared["first_difference"]
    same = "the same tokens" if parted is None else f"tokens part at number {parted + 1}"
    head = f"{other}: {compared['tokens_per_second']:.1f} tokens/s"
    return "; ".join(part for part in (head, faster, same) if part)
