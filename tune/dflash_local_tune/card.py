"""The card of a tuned drafter: its sources and its measurements."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local.bench.report.cell import pipe_table
from dflash_local.version import version
from dflash_local_tune.comparison import Row


@dataclass(frozen=True)
class Card:
    """The record of a run. `lengths`: steps, and the tokens per round on held-out answers. `before`
    is None if the drafter was trained from nothing, `data` where the texts were general ones.
    `won`: the drafter is better than the old one, or than none. `is_default`: it is the target's
    from now on."""

    target: Path
    before: Path | None
    after: Path
    data: Path | None
    n_prompts: int
    n_held_out: int
    n_asked: int
    n_tokens: int
    n_steps: int
    best_step: int
    seconds: float
    trained: str
    lengths: Sequence[tuple[int, float]]
    rows: Sequence[Row]
    won: bool
    is_default: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        values = {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}
        rows = [{**asdict(row), "ratio": round(row.ratio, 4)} for row in self.rows]
        return values | {"rows": rows, "lengths": [list(each) for each in self.lengths]}

    def markdown(self) -> str:
        """The card as a README. Of the texts it tells nothing but their number."""
        verdict = "it did not win, so nothing changes for the target"
        made = "trained from nothing"
        if self.before:
            verdict = "it did not win, so the old drafter stays the target's default"
            made = f"tuned from `{self.before.name}`"
        if self.won:
            verdict = "it won; give it where the target has the same adapters"
        if self.is_default:
            verdict = "it is the target's default drafter on this machine"
        source, share = ", all of them general", ""
        if self.data is not None:
            source, share = f", from `{self.data.name}`", ", a quarter of them general"
        return f"""\
# {self.after.stem}

A DFlash drafter for `{self.target.name}`, {made} by dflash-local {version()}. Answers are the
target's own with any drafter; this one changes how fast they come.

| | |
|---|---|
| prompts to learn from | {self.n_prompts}{source} |
| held out | {self.n_held_out} |
| asked of the target | {self.n_asked} prompts{share} |
| answers of the target | {self.n_tokens} tokens |
| steps | {self.n_steps}, the best after {self.best_step} |
| trained | {self.trained} |
| time | {self.seconds / 60:.0f} minutes |

Measured by dflash-local's engine, whole blocks in every round, answers in turns:

{pipe_table(cells(self.rows))}

Result: {self.reason}; {verdict}.
"""


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The comparison as the cells of a table."""
    return [
        {
            "prompts": f"{row.prompts} ({row.n_prompts})",
            "drafts": f"{row.shape}s",
            "temp": f"{row.temperature:g}",
            "tokens per round before": f"{row.length_before:.2f}",
            "after": f"{row.length_after:.2f}",
            "ratio": f"{row.ratio:.2f}",
            "tokens/s before": f"{row.speed_before:.1f}",
            "tokens/s after": f"{row.speed_after:.1f}",
        }
        for row in rows
    ]
