"""The cost of one request, and its gain by drafting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Stats:
    """Counts of tokens and seconds of one request.

    `rounds` counts verify passes, plain decoding steps included. `drafted` and `accepted` count
    drafted tokens. `emitted` counts all tokens of the answer, also the first one, which comes from
    the prompt's last row. `outcomes` counts rounds by (drafts verified, tokens emitted), `reaches`
    by (longest branch, tokens emitted), which is the same for chains. `tree_rounds` are rounds that
    verified a draft tree, `leaves` the branches in them, and `side_rounds` those whose answer left
    the chain of the drafter's best tokens. `graph_rebuilds` are passes for which llama.cpp built
    its graph again. `shifts` counts the parts of the text left out to make room.

    `copied` are the drafted tokens that no drafter proposed, as the text had them already, and
    `copied_accepted` those of them that were accepted. `drafter` says what proposed the others.

    `drafting` says in a line why the controller drafts or does not, `warning` names a fault.
    `prompt_tokens` include the `cached_tokens`, which were not computed again. `prompt_s` ends and
    `decode_s` begins with the prompt's last row. `draft_s`, `verify_s` and `sample_s` are parts of
    `decode_s`. `queue_s` is the time without a slot. `ttft_s` is the time from the request to its
    first token.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    copied: int = 0
    copied_accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    ttft_s: float = 0.0
    graph_rebuilds: int = 0
    shifts: int = 0
    drafting: str | None = None
    warning: str | None = None
    drafter: str | None = None
    tree_rounds: int = 0
    leaves: int = 0
    side_rounds: int = 0
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    reaches: Counter[tuple[int, int]] = field(default_factory=Counter)

    @classmethod
    def sum(cls, parts: Iterable[Stats]) -> Stats:
        """The counts and seconds of several requests added up, `ttft_s` too. `drafting` and
        `warning` stay None, and `drafter` is that of the last one."""
        total = cls()
        for part in parts:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.drafter = part.drafter or total.drafter
            # Copied in one step: another thread may be recording a round.
            total.outcomes.update(dict(part.outcomes))
            total.reaches.update(dict(part.reaches))
        return total

    def record_round(self, *, drafted: int, emitted: int, depth: int | None = None) -> None:
        """Count one verify pass over `drafted` nodes that emitted `emitted` (at least 1) tokens.

        `depth` is the length of the longest branch; None for a chain.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += emitted - 1
        self.emitted += emitted
        self.outcomes[drafted, emitted] += 1
        self.reaches[drafted if depth is None else depth, emitted] += 1

    def record_copies(self, *, drafted: int, accepted: int) -> None:
        """Count the copies among the drafts of the last counted pass, and the accepted ones of
        them."""
        self.copied += drafted
        self.copied_accepted += accepted

    def record_tree(self, *, leaves: int, on_side: bool) -> None:
        """Mark a counted pass as one over a tree. `on_side`: the answer left the first branch."""
        self.tree_rounds += 1
        self.leaves += leaves
        self.side_rounds += on_side

    @property
    def accepted_lengths(self) -> dict[int, int]:
        """Number of rounds by the tokens that they emitted (accepted drafts + 1)."""
        return _summed((emitted, n) for (_, emitted), n in self.outcomes.items())

    @property
    def widths(self) -> dict[int, int]:
        """Number of rounds by the rows that they verified, the anchor included."""
        return _summed((drafted + 1, n) for (drafted, _), n in self.outcomes.items())

    @property
    def position_drafted(self) -> list[int]:
        """Verified drafts, by their position after the anchor: first, second, ..."""
        most = max((depth for depth, _ in self.reaches), default=0)
        return [
            sum(n for (depth, _), n in self.reaches.items() if depth > position)
            for position in range(most)
        ]

    @property
    def position_accepted(self) -> list[int]:
        """Accepted drafts, by their position after the anchor: first, second, ..."""
        return [
            sum(n for (_, emitted), n in self.reaches.items() if emitted > position + 1)
            for position in range(len(self.position_drafted))
        ]

    @property
    def _round_tokens(self) -> int:
        return sum(emitted * n for (_, emitted), n in self.outcomes.items())

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted per verify pass: accepted drafts, and one of the target's own; 0 before
        the first pass."""
        return self._round_tokens / self.rounds if self.rounds else 0.0

    @property
    def gained_by(self) -> str:
        """The source of the accepted drafts, in words; "" if none was accepted."""
        own, drafter = self.accepted - self.copied_accepted, self.drafter or "the drafter"
        if not self.copied_accepted:
            return f"by {drafter}" if own else ""
        if not own:
            return "by copies of the text alone"
        tokens = "1 token" if own == 1 else f"{own} tokens"
        return f"by {drafter} ({tokens}) and by copies of the text ({self.copied_accepted})"

    @property
    def tokens_per_second(self) -> float:
        """Tokens that rounds emitted, per second of these rounds. The prompt does not count."""
        return self._round_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def rest_s(self) -> float:
        """Decoding time that is not spent on draft, verify or sample."""
        return max(0.0, self.decode_s - self.draft_s - self.verify_s - self.sample_s)

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the decoding time: draft, verify, sample, rest. They add up to 1, or are all 0
        if nothing was decoded."""
        parts = {
            "draft": self.draft_s,
            "verify": self.verify_s,
            "sample": self.sample_s,
            "rest": self.rest_s,
        }
        total = sum(parts.values())
        return {name: seconds / total if total > 0 else 0.0 for name, seconds in parts.items()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: seconds rounded to microseconds, ratios to four digits, text as keys."""
        return {
            **{name: round(getattr(self, name), 6) for name in _SUMMED},
            "rest_s": round(self.rest_s, 6),
            "tokens_per_round": round(self.tokens_per_round, 4),
            "tokens_per_second": round(self.tokens_per_second, 4),
            "accepted_lengths": {str(n): rounds for n, rounds in self.accepted_lengths.items()},
            "widths": {str(width): rounds for width, rounds in self.widths.items()},
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "shares": {name: round(share, 4) for name, share in self.shares.items()},
        }


_AS_THEY_ARE = ("position_drafted", "position_accepted", "drafter", "drafting", "warning")
_SUMMED = [field.name for field in fields(Stats) if field.type in ("int", "float")]


def _summed(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Sums by key, keys rising."""
    sums = Counter[int]()
    for key, n in pairs:
        sums[key] += n
    return dict(sorted(sums.items()))
