"""All that a drafter has in common with its target: vocabulary, mask token, taps, hidden size."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.gguf.file import GgufFile

from .families import SPECULATORS, ConfigFields
from .fields import refuse, stating


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a target that a drafter's file depends on; the defaults say that it is not known."""

    architecture: str = ""
    n_layer: int | None = None
    n_embd: int | None = None
    n_vocab: int | None = None
    uses_mrope: bool = False
    """Whether a position has several parts (time, height, width)."""

    @classmethod
    def of(cls, file: GgufFile) -> TargetFacts:
        name = file.architecture
        sections = file.get(f"{name}.rope.dimension_sections")
        return cls(
            name,
            file.get(f"{name}.block_count"),
            file.get(f"{name}.embedding_length"),
            file.n_vocab,
            isinstance(sections, list) and any(sections),
        )


def check_hidden_size(config: ConfigFields, target: TargetFacts, n_embd: int) -> None:
    """Raise FileError unless the target's is the drafter's."""
    name, expected = "target_hidden_size", f"the drafter's hidden_size, {n_embd}"
    if config.top.integer(name) not in (None, n_embd):
        config.top.refuse(name, expected)
    if target.n_embd not in (None, n_embd):
        refuse("hidden_size of the target", target.n_embd, expected)


def read_vocabulary(config: ConfigFields, target: TargetFacts) -> tuple[int, int]:
    """The number of tokens of the target, and of those that the drafter's head knows."""
    n_vocab = config.top.integer("vocab_size") or target.n_vocab
    if n_vocab is None:
        config.top.missing("vocab_size", "a whole number, here or in the target")
    reduced = config.top.integer("draft_vocab_size")
    if reduced is not None and reduced > n_vocab:
        config.top.refuse("draft_vocab_size", f"at most vocab_size, {n_vocab}")
    if reduced not in (None, n_vocab) and not config.layout.reduces_vocabulary:
        config.top.refuse("draft_vocab_size", f"vocab_size, {n_vocab}, or none")
    if config.nested.integer("selector_vocab_size") not in (None, n_vocab):
        config.nested.refuse("selector_vocab_size", f"vocab_size, {n_vocab}, or none")
    return n_vocab, reduced or n_vocab


def read_mask_token(config: ConfigFields) -> int:
    owner = stating("mask_token_id", config.nested, config.top)
    token = owner.integer("mask_token_id", 0)
    if token is None:
        config.nested.missing("mask_token_id", "the id of the mask token")
    return token


def read_taps(config: ConfigFields, target: TargetFacts) -> tuple[int, ...]:
    """The layers of the target whose inputs are tapped."""
    # the config names the layer whose output is tapped: that is the input of the next layer
    owner, name, step = config.nested, "target_layer_ids", 1
    if owner.raw(name) is None:
        owner = config.top
        knows_inputs = config.family == "dspark" or config.layout == SPECULATORS
        if knows_inputs and owner.raw("aux_hidden_state_layer_ids") is not None:
            # These are inputs already: speculators numbers hidden states from the embeddings on.
            # Versions of vLLM before its pull request 40727 read it otherwise, training never did.
            name, step = "aux_hidden_state_layer_ids", 0
    ids = owner.integers(name, 1 - step)
    if not ids:
        owner.missing(name, "the layers of the target that the drafter reads")
    stated = stating("num_target_layers", config.top, config.nested).integer("num_target_layers")
    advice = "; give the target that the drafter was trained for"
    for n_layer, told in ((stated, ""), (target.n_layer, advice)):
        if n_layer is not None and max(ids) - 1 + step >= n_layer:
            owner.refuse(name, f"layers of a target that has {n_layer}{told}")
    return tuple(layer + step for layer in ids)
