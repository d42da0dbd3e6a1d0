"""What answers cost: OpenAI's `usage`, llama-server's `timings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_local.result import Result


def usage(
    results: Sequence[Result], *, per_prompt: int = 1, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Tokens of all results, of which each `per_prompt` ones answer the same prompt.

    A prompt counts once, however many answers it has; cached are the tokens of it that none of
    them had to compute. Drafts are not OpenAI's `prediction`, so its fields stay out: `timings`
    has them. `reasoning_tokens` is None where the model does not reason.
    """
    groups = [results[i : i + per_prompt] for i in range(0, len(results), per_prompt)]
    prompt = sum(group[0].stats.prompt_tokens for group in groups)
    cached = sum(min(result.stats.cached_tokens for result in group) for group in groups)
    completion = sum(len(result.tokens) for result in results)
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning_tokens is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return told


def timings(results: Result | Sequence[Result]) -> dict[str, Any]:
    """Counts and milliseconds in llama-server's names, summed over `results`.

    `cache_n` and `prompt_n` together are the prompt. `draft_n` drafted tokens were verified, of
    which `draft_n_accepted` became part of the answer; both are left out where nothing was drafted.
    """
    if isinstance(results, Result):
        results = [results]
    stats = [result.stats for result in results]
    cached = sum(s.cached_tokens for s in stats)
    prompt_n = sum(s.prompt_tokens for s in stats) - cached
    predicted_n = sum(len(result.tokens) for result in results)
    prompt_ms = 1e3 * sum(s.prompt_s for s in stats)
    predicted_ms = 1e3 * sum(s.decode_s for s in stats)
    told: dict[str, Any] = {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(1e3 * prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": _ratio(1e3 * predicted_n, predicted_ms),
    }
    drafted = sum(s.drafted for s in stats)
    if drafted:
        told["draft_n"] = drafted
        told["draft_n_accepted"] = sum(s.accepted for s in stats)
    return told


def _ratio(a: float, b: float) -> float:
    return round(a / b, 4) if b > 0 else 0.0
