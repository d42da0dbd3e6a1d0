"""Every tensor of a checkpoint has its place in the GGUF file, or is named in an error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_drafters
import shipped_drafter
from dflash_local.convert.config.drafter_config import DraftConfig, read_config
from dflash_local.convert.files.checkpoint import TensorEntry
from dflash_local.convert.tensors.names import left_out, plan_tensors
from dflash_local.errors import FileError

# Names in the GGUF file, and in the checkpoint. `%` stands for the layer.
LAYER = {
    f"blk.%.{name}.weight": f"layers.%.{source}.weight"
    for name, source in shipped_drafter.LAYERS.items()
}
SINKS = {"blk.%.attn_sinks.weight": "layers.%.self_attn.attention_sink_bias"}
BIASES = {
    f"blk.%.attn_{name}.bias": f"layers.%.self_attn.{source}_proj.bias"
    for name, source in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
}
PLAIN = shipped_drafter.GLOBALS | LAYER
EMBEDDINGS = {"token_embd.weight": "embed_tokens.weight"}
HEAD = {"output.weight": "lm_head.weight"}
D2T = {"d2t": "d2t"}
FACTORS = {"rope_freqs.weight": ""}
MARKOV = {f"markov_{w}.weight": f"markov_head.markov_{w}.weight" for w in ("w1", "w2")}
CONFIDENCE = {f"conf_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
TWO = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "blk.%.attn_conv_base": "layers.%.attention_conv.base_kernel",
    "blk.%.attn_conv_proj.weight": "layers.%.attention_conv.kernel_projection.weight",
    "blk.%.ffn_conv_base": "layers.%.mlp_conv.base_kernel",
    "blk.%.ffn_conv_proj.weight": "layers.%.mlp_conv.kernel_projection.weight",
}
GEMMA4 = {
    "blk.%.attn_v.weight": None,
    "blk.%.ffn_norm.weight": "layers.%.pre_feedforward_layernorm.weight",
    "blk.%.post_attention_norm.weight": "layers.%.post_attention_layernorm.weight",
    "blk.%.post_ffw_norm.weight": "layers.%.post_feedforward_layernorm.weight",
    "blk.%.layer_output_scale.weight": "layers.%.layer_scalar",
    **{name: source.replace("head.", "") for name, source in CONFIDENCE.items()},
}
NAMES: dict[str, dict[str, str | None]] = {
    "plain": {},
    "sliding": {},
    "swa-sinks": SINKS,
    "gpt-oss": BIASES,
    "llama3": FACTORS,
    "own-head": EMBEDDINGS | HEAD,
    "reduced": HEAD | D2T,
    "dflash2": TWO,
    "dspark": MARKOV | CONFIDENCE,
    "dspark-interleaved": MARKOV,
    "dspark-sinks": MARKOV | SINKS,
    "speculators": EMBEDDINGS | HEAD | D2T | MARKOV | CONFIDENCE,
    "speculators-dflash": EMBEDDINGS | HEAD | D2T,
    "speculators-dflash2": EMBEDDINGS | HEAD | TWO,
    "gemma4": EMBEDDINGS | MARKOV | FACTORS | GEMMA4,
    "muse-glimmer": {
        "enc.output_norm.weight": "encoder.output_norm_enc.weight",
        "fc.weight": "encoder.fc.weight",
    },
}


def entries(name: str, **changes: tuple[int, ...] | None) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint; `changes` of shapes, or None to leave one out."""
    shapes = {**hf_drafters.shapes(name), **changes}
    return {
        key: TensorEntry(key, "BF16", shape, Path("model.safetensors"), 0, 2 * int(np.prod(shape)))
        for key, shape in shapes.items()
        if shape is not None
    }


def read(name: str, **changes: Any) -> DraftConfig:
    raw = hf_drafters.config(name) | changes
    return read_config(raw, target=hf_drafters.target_facts(name))


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_has_its_name_and_the_shape_of_the_checkpoint(name: str) -> None:
    config, tensors = read(name), entries(name)
    expected = {
        new.replace("%", str(layer)): old.replace("%", str(layer))
        for new, old in (PLAIN | NAMES[name]).items()
        for layer in range(config.spec.n_layer)
        if old is not None
    }
    plans = plan_tensors(config, tensors)
    assert [plan.name for plan in plans] == list(dict.fromkeys(plan.name for plan in plans))
    assert {plan.name: plan.source for plan in plans} == expected
    for plan in plans:
        if plan.source:
            assert plan.shape == (tensors[plan.source].shape[::-1] or (1,))


@pytest.mark.parametrize("name", hf_drafters.VARIANTS)
def test_order_and_prefix_of_the_checkpoint_do_not_matter(name: str) -> None:
    tensors = entries(name)
    plans = plan_tensors(read(name), tensors)
    assert plan_tensors(read(name), dict(reversed(tensors.items()))) == plans
    prefixed = {
        f"model.{key}": replace(entry, name=f"model.{key}") for key, entry in tensors.items()
    }
    found = plan_tensors(read(name), prefixed)
    assert [plan.name for plan in found] == [plan.name for plan in plans]
    assert all(plan.source.startswith("model.") for plan in found if plan.source)


@pytest.mark.parametrize("name", hf_drafters.VARIANTS)
def test_no_tensor_may_be_missing(name: str) -> None:
    config = read(name)
    for missing in hf_drafters.shapes(name):
        confidence = missing.startswith("confidence") and missing.endswith(".bias")
        if missing in ("t2d", "embed_tokens.weight") or confidence:
            continue
        # without its head it would use the target's
        if name == "own-head" or (name, missing) == ("speculators-dflash2", "lm_head.weight"):
            continue
        with pytest.raises(FileError, match=f"1 missing: '{missing}'"):
            plan_tensors(config, entries(name, **{missing: None}))


def test_unknown_and_missing_tensors_are_listed() -> None:
    odd = entries("plain", **{"layers.0.self_attn.q_proj.bias": (64,), "fc.weight": None})
    with pytest.raises(FileError) as caught:
        plan_tensors(read("plain"), odd)
    assert str(caught.value) == (
        "tensors of the checkpoint do not fit a DFlashDraftModel: 1 missing: 'fc.weight'; "
        "1 not known: 'layers.0.self_attn.q_proj.bias'"
    )
    many = entries("plain", **{f"layers.0.mlp.experts.{index}.weight": (1,) for index in range(40)})
    with pytest.raises(FileError, match=r"40 not known: .*, \.\.\.$"):
        plan_tensors(read("plain"), many)


def test_biases_that_are_stated_must_be_there_and_sinks_may() -> None:
    with pytest.raises(FileError, match=r"8 missing: 'layers\.0\.self_attn\.k_proj\.bias', "):
        plan_tensors(read("plain", attention_bias=True), entries("plain"))
    sinks = entries("gpt-oss", **{"layers.0.self_attn.sinks": (4,)})
    planned = [tensor.name for tensor in plan_tensors(read("gpt-oss"), sinks)]
    assert {"blk.0.attn_sinks.weight", "blk.0.attn_q.bias"} < set(planned)


def test_layers_beyond_those_of_the_config_are_not_known() -> None:
    with pytest.raises(FileError, match=r"11 not known: 'layers\.1\."):
        plan_tensors(read("plain", num_hidden_layers=1, layer_types=None), entries("plain"))


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("plain", "fc.weight", (64, 128)),
        ("plain", "norm.weight", (63,)),
        ("plain", "layers.1.self_attn.k_proj.weight", (64, 64)),
        ("dspark", "confidence_head.proj.weight", (1, 64)),
        ("dflash2", "layers.0.mlp_conv.base_kernel", (2, 3, 64)),
        ("reduced", "d2t", (65,)),
        ("gemma4", "layers.0.layer_scalar", (2,)),
        ("gpt-oss", "layers.1.self_attn.o_proj.bias", (32,)),
    ],
)
def test_a_shape_that_is_not_the_configs(name: str, tensor: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FileError, match="expected") as caught:
        plan_tensors(read(name), entries(name, **{tensor: shape}))
    assert str(caught.value).startswith(f"tensor '{tensor}' has the shape {list(shape)}, expected")


def test_the_same_tensor_twice() -> None:
    twice = entries("plain", **{"model.fc.weight": (64, 192)})
    with pytest.raises(FileError, match="the same one twice"):
        plan_tensors(read("plain"), twice)


def test_a_rank_that_the_config_does_not_state_is_the_tensors() -> None:
    plans = plan_tensors(read("dspark", markov_rank=None), entries("dspark"))
    assert next(plan for plan in plans if plan.name == "markov_w1.weight").shape == (8, 256)


TABLE = (256, 64)


@pytest.mark.parametrize(
    ("name", "changes", "tensors", "kept"),
    [
        # the drafter's own head may come with the target's embeddings
        ("plain", {}, {"lm_head.weight": TABLE}, {"output.weight"}),
        # embeddings alone would become the head as well: only where the config says so
        ("plain", {}, {"embed_tokens.weight": TABLE}, {"token_embd.weight"}),
        ("plain", {"tie_word_embeddings": False}, {"embed_tokens.weight": TABLE}, set()),
        ("plain", {"has_embed_tokens": False}, {"embed_tokens.weight": TABLE}, set()),
        # the head of a DSpark drafter with the whole vocabulary is the target's
        ("dspark", {}, {"lm_head.weight": TABLE}, set()),
        (
            "dspark",
            {"tie_word_embeddings": False},
            {"lm_head.weight": TABLE, "embed_tokens.weight": TABLE},
            {"token_embd.weight", "output.weight"},
        ),
        (
            "dspark",
            {"train_embed_tokens": False},
            {"lm_head.weight": TABLE, "embed_tokens.weight": TABLE},
            set(),
        ),
        ("speculators", {}, {"embed_tokens.weight": None}, {"output.weight"}),
    ],
)
def test_whose_embeddings_and_head(
    name: str, changes: dict[str, Any], tensors: dict[str, Any], kept: set[str]
) -> None:
    config, found = read(name, **changes), entries(name, **tensors)
    names = {plan.name for plan in plan_tensors(config, found)}
    assert names & {"token_embd.weight", "output.weight"} == kept
    left = left_out(config, found)
    assert {plan.source for plan in plan_tensors(config, found)} == found.keys() - left.keys()


def test_trained_embeddings_without_a_head_are_refused() -> None:
    config = read("plain", tie_word_embeddings=False, train_embed_tokens=True)
    with pytest.raises(FileError, match=r"lm_head\.weight is missing"):
        plan_tensors(config, entries("plain", **{"embed_tokens.weight": TABLE}))


def test_copies_of_the_target_for_training_are_left_out() -> None:
    extra = {"verifier_norm.weight": (64,), "verifier_lm_head.weight": TABLE}
    found = entries("speculators", **extra)
    assert left_out(read("speculators"), found).keys() == {"t2d", *extra}
    plan_tensors(read("speculators"), found)
    with pytest.raises(FileError, match=r"2 not known: 'verifier_lm_head\.weight'"):
        plan_tensors(read("plain"), entries("plain", **extra))
