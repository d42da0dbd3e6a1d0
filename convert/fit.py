"""Whether a target and a drafter fit, field by field: told from their headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import PairError
from dflash_local.fit.pairing import (
    RECURRENT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
    DrafterSpec,
    check_pair,
    check_target,
)
from dflash_local.gguf.file import GgufFile


@dataclass(frozen=True)
class FieldFit:
    """One thing that target and drafter have to agree on."""

    name: str
    target: Any
    drafter: Any
    fits: bool


@dataclass(frozen=True)
class Fit:
    """Whether a target and a drafter belong together."""

    target: Path
    drafter: Path
    fields: tuple[FieldFit, ...]
    error: str | None
    """What is in the way, in the words of `check_pair`, with the remedy; None when they fit."""

    @property
    def fits(self) -> bool:
        """Whether nothing is in the way."""
        return self.error is None

    def as_dict(self) -> dict[str, Any]:
        """The comparison for JSON."""
        return {
            "fits": self.fits,
            "target": str(self.target),
            "drafter": str(self.drafter),
            "fields": [asdict(field) for field in self.fields],
            "error": self.error,
        }


def compare(target: GgufFile, drafter: GgufFile) -> Fit:
    """Whether the two fit, field by field.

    Raises FileError when one of them is no target or no drafter by itself.
    """
    check_target(target)
    spec = DrafterSpec.read(drafter, n_vocab=target.n_vocab)
    error = None
    try:
        check_pair(target, drafter)
    except PairError as mismatch:
        error = str(mismatch)
    return Fit(target.path, drafter.path, tuple(_compared(target, drafter, spec)), error)


def _compared(target: GgufFile, drafter: GgufFile, spec: DrafterSpec) -> Iterator[FieldFit]:
    """In the order of `check_pair`, so that the first that does not fit is the one it names."""
    name = target.architecture
    rolls_back, tapped = name not in RECURRENT_ARCHITECTURES, name in TAPPED_ARCHITECTURES
    yield FieldFit("roll back", _can(name, rolls_back), "needed", rolls_back)
    yield FieldFit("taps", _can(name, tapped), "needed", tapped)
    n_embd = target.require(f"{name}.embedding_length", int)
    yield FieldFit("hidden size", n_embd, spec.n_embd, n_embd == spec.n_embd)
    n_layer = target.require(f"{name}.block_count", int)
    # layers that predict further tokens come after those that can be tapped
    n_layer -= target.optional(f"{name}.nextn_predict_layers", int, 0)
    inputs = f"inputs of layers {', '.join(map(str, spec.target_layers))}"
    yield FieldFit(
        "tapped layers", f"layers 0 to {n_layer - 1}", inputs, max(spec.target_layers) < n_layer
    )
    yield _equal("vocabulary size", target.n_vocab, spec.n_vocab)
    if "tokenizer.ggml.tokens" not in drafter.metadata:
        return
    yield _equal(
        "tokenizer model", target.get("tokenizer.ggml.model"), drafter.get("tokenizer.ggml.model")
    )
    pre, theirs = target.get("tokenizer.ggml.pre"), drafter.get("tokenizer.ggml.pre")
    # files converted before there were pre-tokenizer names have none
    yield FieldFit("pre-tokenizer", pre, theirs, pre == theirs or None in (pre, theirs))
    yield _same_tokens(target.get("tokenizer.ggml.tokens"), drafter.get("tokenizer.ggml.tokens"))


def _can(architecture: str, able: bool) -> str:
    return f"{architecture}: {'yes' if able else 'no'}"


def _equal(name: str, target: Any, drafter: Any) -> FieldFit:
    return FieldFit(name, target, drafter, target == drafter)


def _same_tokens(target: Sequence[str], drafter: Sequence[str]) -> FieldFit:
    pairs = enumerate(zip(target, drafter, strict=False))
    different = next((index for index, pair in pairs if pair[0] != pair[1]), None)
    if different is not None:
        ours, theirs = (f"{tokens[different]!r} is {different}" for tokens in (target, drafter))
        return FieldFit("tokens", ours, theirs, False)
    return FieldFit("tokens", len(target), len(drafter), len(target) == len(drafter))
