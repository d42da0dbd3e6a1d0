"""Describes a GGUF file, a drafter or a target, from its header."""

import math
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from dflash_local.fit.architectures import (
    HEADS_ARCHITECTURES,
    RECURRENT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
    WayBackKind,
    way_back,
)
from dflash_local.fit.pairing import ASSISTANT, check_target, n_heads_of, read_assistant
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile

_DRAFTER = "dflash"
PROJECTOR = "clip"
"""The architecture of all projectors' files."""

# keys of `general.*` that describe the file, not its origin
_NO_PROVENANCE = frozenset({"architecture", "type", "alignment", "file_type"})

# of a drafter's spec
_OF_SPEC = (
    *("family", "block_size", "n_draft", "target_layers", "n_layer", "n_embd", "n_head"),
    *("n_head_kv", "head_dim", "n_ff", "context_length", "sliding_window", "causal", "rope"),
    *("n_vocab", "n_vocab_draft", "mask_token_id"),
)


@dataclass(frozen=True)
class FileFacts:
    path: Path
    n_bytes: int
    """On disk, all shards together."""
    n_shards: int
    name: str | None
    quantization: str | None
    """The file's own name for its mixture of types, such as Q4_K_M."""
    tokenizer: str | None
    """The kind of its vocabulary, such as "gpt2 (qwen2)"; None if it has none."""
    weights: dict[str, int]
    """Bytes by ggml type, the largest first."""
    provenance: dict[str, Any]
    """Keys that say where the file comes from, as they are stored."""


@dataclass(frozen=True)
class DrafterReport:
    """A drafter, as its own file describes it."""

    file: FileFacts
    spec: DrafterSpec
    mask_token: str | None
    """The text of the mask token, if its vocabulary is known."""

    @property
    def llama_cpp_loads(self) -> bool:
        """Whether stock llama.cpp loads the file, as the attention has no biases."""
        return not self.spec.attention_bias

    @property
    def taps_after(self) -> tuple[int, ...]:
        """The taps, as the layers of the target whose outputs they are."""
        return tuple(layer - 1 for layer in self.spec.target_layers)

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """The drafter's layers that have the window."""
        return tuple(i for i, windowed in enumerate(self.spec.sliding_layers) if windowed)

    def as_dict(self) -> dict[str, Any]:
        spec = {name: getattr(self.spec, name) for name in _OF_SPEC}
        own = ("file", "mask_token", "llama_cpp_loads", "taps_after", "sliding_layers")
        more = {name: getattr(self, name) for name in own}
        return {"role": "drafter", "architecture": _DRAFTER, **_plain(spec), **_plain(more)}


@dataclass(frozen=True)
class AssistantReport:
    """Heads of a target in a file of their own."""

    file: FileFacts
    n_draft: int
    n_layer: int
    n_embd: int
    n_embd_target: int
    """That of the hidden state that they read."""
    n_vocab: int

    def as_dict(self) -> dict[str, Any]:
        return {"role": "drafter", "architecture": ASSISTANT, **_plain(self)}


@dataclass(frozen=True)
class TargetReport:
    """A language model, and its abilities with a drafter in llama.cpp."""

    file: FileFacts
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    context_length: int
    offers_taps: bool
    """Whether llama.cpp gives out the hidden states of this architecture's layers."""
    is_recurrent: bool
    """Whether some layers have a state that stands for all tokens of a sequence."""
    n_heads: int
    """Layers that predict further tokens, which are not among `n_layer`."""
    way_back: WayBackKind | None
    """The way in which rejected tokens are taken back; None: they cannot be."""

    @property
    def drafts_with_heads(self) -> bool:
        """Whether it can draft with its heads here."""
        return self.n_heads > 0 and self.architecture in HEADS_ARCHITECTURES and self.rolls_back

    @property
    def rolls_back(self) -> bool:
        """Whether rejected tokens can be taken back."""
        return self.way_back is not None

    @property
    def takes_drafters(self) -> bool:
        """Whether a DFlash drafter can work with it here. An ordinary model needs no taps."""
        return self.offers_taps and self.rolls_back

    def as_dict(self) -> dict[str, Any]:
        names = ("rolls_back", "takes_drafters", "drafts_with_heads")
        more = {name: getattr(self, name) for name in names}
        return {"role": "target", **_plain(self), **more}


@dataclass(frozen=True)
class ProjectorReport:
    """A projector, with which a vision model reads images."""

    file: FileFacts
    kind: str
    """As libmtmd names it."""
    reads: tuple[str, ...]
    """Images, or sounds, which are not read here."""
    n_embd: int | None
    """The hidden size of the targets that it fits."""

    def as_dict(self) -> dict[str, Any]:
        return {"role": "projector", **_plain(self)}


Report = DrafterReport | AssistantReport | TargetReport | ProjectorReport


def inspect_file(file: GgufFile) -> Report:
    """A report on `file`. Raises FileError if it is no drafter, projector or language model."""
    if file.architecture == _DRAFTER:
        return inspect_drafter(file)
    if file.architecture == PROJECTOR:
        return _inspect_projector(file)
    if file.architecture == ASSISTANT:
        return _inspect_assistant(file)
    check_target(file)
    name = file.architecture
    return TargetReport(
        file=_facts(file),
        architecture=name,
        n_layer=file.require(f"{name}.block_count", int) - n_heads_of(file),
        n_heads=n_heads_of(file),
        n_embd=file.require(f"{name}.embedding_length", int),
        n_vocab=file.n_vocab or 0,
        context_length=file.require(f"{name}.context_length", int),
        offers_taps=name in TAPPED_ARCHITECTURES,
        is_recurrent=name in RECURRENT_ARCHITECTURES,
        way_back=way_back(name),
    )


def _inspect_assistant(file: GgufFile) -> AssistantReport:
    spec = read_assistant(file)
    return AssistantReport(
        file=_facts(file),
        n_draft=spec.n_draft,
        n_layer=file.require(f"{ASSISTANT}.block_count", int),
        n_embd=file.require(f"{ASSISTANT}.embedding_length", int),
        n_embd_target=file.require(f"{ASSISTANT}.embedding_length_out", int),
        n_vocab=spec.n_vocab,
    )


def _inspect_projector(file: GgufFile) -> ProjectorReport:
    reads = {"images": "clip.has_vision_encoder", "sounds": "clip.has_audio_encoder"}
    kinds = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")
    widths = ("clip.vision.projection_dim", "clip.audio.projection_dim")
    return ProjectorReport(
        _facts(file),
        str(next((file.metadata[key] for key in kinds if key in file.metadata), "unknown"))[:60],
        tuple(what for what, key in reads.items() if file.metadata.get(key) is True),
        next((file.require(key, int) for key in widths if key in file.metadata), None),
    )


def inspect_drafter(file: GgufFile, *, target: GgufFile | None = None) -> DrafterReport:
    """A report on the drafter `file`. If it has no vocabulary, that of `target` is used.

    Raises FileError for a file that is not a drafter, or that contradicts itself.
    """
    spec = read_drafter(file, n_vocab=target.n_vocab if target else None)
    tokens = file.get("tokenizer.ggml.tokens") or (
        target.get("tokenizer.ggml.tokens") if target else None
    )
    return DrafterReport(_facts(file), spec, tokens[spec.mask_token_id] if tokens else None)


def _facts(file: GgufFile) -> FileFacts:
    name = file.get("general.name")
    types: Counter[str] = Counter()
    for tensor in file.tensors.values():
        types[tensor.type_name] += tensor.n_bytes
    return FileFacts(
        path=file.path,
        n_bytes=file.n_bytes,
        n_shards=len(file.shards),
        name=name if isinstance(name, str) else None,
        quantization=file.quantization,
        tokenizer=_tokenizer(file),
        weights=dict(types.most_common()),
        provenance=_provenance(file),
    )


def _tokenizer(file: GgufFile) -> str | None:
    if not isinstance(file.get("tokenizer.ggml.tokens"), list):
        return None
    model, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    return f"{model} ({pre})" if pre else str(model)


def _provenance(file: GgufFile) -> dict[str, Any]:
    found = {}
    for key, value in file.metadata.items():
        group, _, rest = key.partition(".")
        told = group == "general" and rest not in _NO_PROVENANCE and "quantization" not in rest
        if told or group == "dflash_local":
            found[key] = value
    return found


def _plain(value: Any) -> Any:
    """A value for JSON: dataclasses as dictionaries, tuples as lists, unknown things as text."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
