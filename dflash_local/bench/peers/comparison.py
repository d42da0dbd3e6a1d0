"""The same prompts and limits through llama.cpp's own server, plain and with its DFlash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.bench.measure.concurrent import TURNS, ConcurrencyRow
from dflash_local.bench.measure.single import Row, Say, Settings
from dflash_local.bench.measure.speed import PLAIN, Spread, Way, significant
from dflash_local.bench.prompts.case import Case
from dflash_local.bench.synthetic.recorded import RecordedDrafts

if TYPE_CHECKING:
    from dflash_local.bench.peers.llama_server import LlamaServer, PeerAnswer
    from dflash_local.model import Model

_LEAST_TOKENS = 8
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Peer:
    """How to start the server: with the files and settings of the model that it is held against.

    `n_drafts` are the drafts a round, one server for each; 0 is plain decoding. `synthetic_length`
    are the tokens that a round of whole chains is to accept, None leaves it to the models.
    """

    binary: Path
    target: Path
    draft: Path | None
    n_ctx: int
    n_gpu_layers: int
    n_threads: int
    n_drafts: tuple[int, ...]
    flash_attn: bool = True
    kv_type: str = "f16"
    synthetic_length: float | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        binary: Path,
        draft: Path | None,
        *,
        n_drafts: Sequence[int],
        synthetic_length: float | None,
    ) -> Peer:
        """The server for what `model` has loaded, `draft` being the drafter's file."""
        options = model.target.options
        return cls(
            binary=binary,
            target=model.target.path,
            draft=draft,
            n_ctx=model.n_ctx,
            n_gpu_layers=options.n_gpu_layers,
            n_threads=model.target.n_threads,
            n_drafts=(0, *(n_drafts if draft else ())),
            flash_attn=options.flash_attn,
            kv_type=options.kv_type,
            synthetic_length=synthetic_length,
        )

    def server(self, n_drafts: int, n_slots: int) -> LlamaServer:
        """One that is still to be entered; its slots share the context, as our sequences do."""
        from dflash_local.bench.peers.llama_server import LlamaServer

        drafting, length = n_drafts > 0, self.synthetic_length
        rates = None
        if drafting and length is not None:
            rates = RecordedDrafts.shipped().rates(length, n_drafts)
        return LlamaServer(
            self.binary,
            self.target,
            self.draft if drafting else None,
            n_ctx=self.n_ctx // n_slots,
            n_slots=n_slots,
            n_gpu_layers=self.n_gpu_layers,
            n_threads=self.n_threads,
            n_draft_max=n_drafts or 1,
            synthetic_rates=rates,
            flash_attn=self.flash_attn,
            kv_type=self.kv_type,
        )


@dataclass(frozen=True)
class PeerRow:
    """A category through the server: tokens/s of one request, or of all that run at once.

    `n_drafts` is 0 for plain decoding. `ours` is what this package made of the same, in its ways:
    plainly, or with drafts of the width that it chose itself.
    """

    category: str
    temperature: float
    concurrency: int
    n_drafts: int
    tokens_per_second: Spread
    ttft_s: Spread | None
    accepted_length: float | None
    ours: dict[Way, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "n_drafts": self.n_drafts,
            "tokens_per_second": self.tokens_per_second.as_dict(),
            "ttft_s": self.ttft_s.as_dict() if self.ttft_s else None,
            "accepted_length": _rounded(self.accepted_length),
            "ours": [
                {
                    **way.as_dict(),
                    "tokens_per_second": significant(speed),
                    "over_theirs": significant(speed / self.tokens_per_second.median),
                }
                for way, speed in self.ours.items()
            ],
        }


def run_against(
    peer: Peer,
    cases: Sequence[Case],
    levels: Sequence[int],
    settings: Settings,
    say: Say,
) -> list[PeerRow]:
    """Measure the server on its own, one process for each number of drafts and of slots.

    `levels` are the numbers of requests at once beside 1. Raises what `LlamaServer` raises.
    """
    rows: list[PeerRow] = []
    for n in (1, *(level for level in levels if level > 1)):
        for n_drafts in peer.n_drafts:
            with peer.server(n_drafts, n) as server:
                server.complete(cases[0].tokens, **_request(settings, 0.0, 0, _WARM_UP_TOKENS))
                for temperature in settings.temperatures:
                    for category in dict.fromkeys(case.category for case in cases):
                        group = [case for case in cases if case.category == category]
                        if n == 1:
                            row = _alone(server, group, n_drafts, temperature, settings)
                        else:
                            row = _at_once(server, group, n, n_drafts, temperature, settings)
                        if row is not None:
                            say(_progress(row))
                            rows.append(row)
    return rows


def held_against(
    rows: Sequence[PeerRow], alone: Sequence[Row], together: Sequence[ConcurrencyRow]
) -> list[PeerRow]:
    """The rows with what this package made of the same: plain by plain, and drafted by drafted,
    with those ways whose width is the first that was measured."""
    ours: dict[tuple[str, float, int], dict[Way, float]] = {}
    for row in alone:
        key = row.category, row.temperature, 1
        for way, speed in ((PLAIN, row.plain), (row.way, row.drafted)):
            if row.cache == "cold" and speed and speed.tokens_per_second:
                ours.setdefault(key, {})[way] = speed.tokens_per_second.median
    for many in together:
        key = many.category, many.temperature, many.n
        for way, found in ((PLAIN, many.plain), (many.way, many.drafted)):
            if many.n > 1 and found:
                ours.setdefault(key, {})[way] = found.total.median
    return [
        replace(row, ours=_comparable(row, ours.get(key, {})))
        for row in rows
        for key in [(row.category, row.temperature, row.concurrency)]
    ]


def _comparable(row: PeerRow, ours: dict[Way, float]) -> dict[Way, float]:
    drafted = [way for way in ours if way != PLAIN]
    chosen = [way for way in drafted if way.width == drafted[0].width] if row.n_drafts else [PLAIN]
    return {way: ours[way] for way in chosen if way in ours}


def _request(
    settings: Settings, temperature: float, seed: int, max_tokens: int | None = None
) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens or settings.max_tokens,
        "temperature": temperature,
        "seed": settings.seed + seed,
        "ignore_eos": not settings.compare,
    }


def _alone(
    server: LlamaServer,
    group: Sequence[Case],
    n_drafts: int,
    temperature: float,
    settings: Settings,
) -> PeerRow | None:
    answers = [
        server.complete(case.tokens, **_request(settings, temperature, repeat))
        for repeat in range(settings.repeat)
        for case in group
    ]
    speeds = Spread.of(a.tokens_per_second for a in answers if a.n_tokens > _LEAST_TOKENS)
    if speeds is None:
        return None
    return PeerRow(
        category=group[0].category,
        temperature=temperature,
        concurrency=1,
        n_drafts=n_drafts,
        tokens_per_second=speeds,
        ttft_s=Spread.of(answer.ttft_s for answer in answers),
        accepted_length=_accepted_length(answers, n_drafts),
    )


def _at_once(
    server: LlamaServer,
    group: Sequence[Case],
    n: int,
    n_drafts: int,
    temperature: float,
    settings: Settings,
) -> PeerRow:
    prompts = [group[i % len(group)].tokens for i in range(TURNS * n)]
    totals: list[float] = []
    answers: list[PeerAnswer] = []
    for repeat in range(max(2, settings.repeat)):
        found, seconds = server.complete_all(prompts, **_request(settings, temperature, repeat))
        totals.append(sum(answer.n_tokens for answer in found) / seconds)
        answers += found
    total = Spread.of(totals)
    assert total is not None, "a level is measured at least twice"
    return PeerRow(
        category=group[0].category,
        temperature=temperature,
        concurrency=n,
        n_drafts=n_drafts,
        tokens_per_second=total,
        ttft_s=Spread.of(answer.ttft_s for answer in answers),
        accepted_length=_accepted_length(answers, n_drafts),
    )


def _accepted_length(answers: Sequence[PeerAnswer], n_drafts: int) -> float | None:
    tokens = sum(answer.n_tokens - 1 for answer in answers)
    rounds = sum(answer.rounds for answer in answers)
    return tokens / rounds if n_drafts and rounds > 0 else None


def _progress(row: PeerRow) -> str:
    kind = f"DFlash, {row.n_drafts} drafts" if row.n_drafts else "plain"
    at_once = f", {row.concurrency} at once" if row.concurrency > 1 else ""
    return (
        f"llama-server, {kind}: {row.category}, temperature {row.temperature:g}{at_once}: "
        f"{row.tokens_per_second.median:.4g} tokens/s"
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else significant(value)
