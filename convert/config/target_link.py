"""All that a drafter has in common with its target: vocabulary, mask token, taps, hidden size."""

from collections.abc import Mapping
from typing import Any

from dflash_local.errors import FileError
from dflash_local.gguf.file import GgufFile

from .families import SPECULATORS, ConfigFields
from .fields import Fields, stating


def target_fields(target: Mapping[str, Any] | None) -> Fields:
    """The fields of the target's language model; empty if the target is not known."""
    if target is None:
        return Fields({}, "of the target: ")
    if not isinstance(target, Mapping):
        raise FileError("config.json of the target: expected a JSON object")
    fields = Fields(target, "of the target: ")
    text = fields.object("text_config")
    return fields if text is None else Fields(text.values, "of the target: ")


def target_facts(file: GgufFile) -> dict[str, Any]:
    """The fields of a config.json that `read_config` needs, from the target's GGUF file."""
    name = file.architecture
    facts: dict[str, Any] = {
        "model_type": name,
        "num_hidden_layers": file.get(f"{name}.block_count"),
        "hidden_size": file.get(f"{name}.embedding_length"),
        "vocab_size": file.n_vocab,
    }
    sections = file.get(f"{name}.rope.dimension_sections")
    if isinstance(sections, list) and any(sections):
        facts["rope_parameters"] = {"mrope_section": sections}
    return facts


def uses_mrope(target: Fields) -> bool:
    """True if a position of the target has several parts (time, height, width)."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = target.raw(name)
        if isinstance(rope, Mapping) and rope:
            return "mrope_section" in rope
    return False


def check_hidden_size(config: ConfigFields, target: Fields, n_embd: int) -> None:
    """Raise FileError unless the target's is the drafter's."""
    for fields, name in ((config.top, "target_hidden_size"), (target, "hidden_size")):
        if fields.integer(name) not in (None, n_embd):
            fields.refuse(name, f"the drafter's hidden_size, {n_embd}")


def read_vocabulary(config: ConfigFields, target: Fields) -> tuple[int, int]:
    """The number of tokens of the target, and of those that the drafter's head knows."""
    n_vocab = config.top.integer("vocab_size") or target.integer("vocab_size")
    if n_vocab is None:
        config.top.missing("vocab_size", "a whole number, here or in the target's config")
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


def read_taps(config: ConfigFields, target: Fields) -> tuple[int, ...]:
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
    for n_layer, told in ((stated, ""), (target.integer("num_hidden_layers"), advice)):
        if n_layer is not None and max(ids) - 1 + step >= n_layer:
            owner.refuse(name, f"layers of a target that has {n_layer}{told}")
    return tuple(layer + step for layer in ids)
