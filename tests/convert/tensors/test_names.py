"""Every tensor of a checkpoint has its place in the GGUF file, or is named in an error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_drafters
from dflash_local.convert.config.drafter_config import DraftConfig, read_config
from dflash_local.convert.files.checkpoint import TensorEntry
from dflash_local.convert.tensors.names import left_out, plan_tensors
from dflash_local.convert.tensors.plan import TensorPlan
from dflash_local.errors import FileError

# name in the GGUF file: name in the checkpoint, shape with the row length first
GLOBALS = {
    "enc.output_norm.weight": ("hidden_norm.weight", (64,)),
    "fc.weight": ("fc.weight", (192, 64)),
    "output_norm.weight": ("norm.weight", (64,)),
}
LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", (64,)),
    "attn_q.weight": ("self_attn.q_proj.weight", (64, 64)),
    "attn_k.weight": ("self_attn.k_proj.weight", (64, 32)),
    "attn_v.weight": ("self_attn.v_proj.weight", (64, 32)),
    "attn_output.weight": ("self_attn.o_proj.weight", (64, 64)),
    "attn_q_norm.weight": ("self_attn.q_norm.weight", (16,)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", (16,)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (64,)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (64, 96)),
    "ffn_up.weight": ("mlp.up_proj.weight", (64, 96)),
    "ffn_down.weight": ("mlp.down_proj.weight", (96, 64)),
}
SINKS = {"attn_sinks.weight": ("self_attn.attention_sink_bias", (4,))}
BIASES = {
    "attn_q.bias": ("self_attn.q_proj.bias", (64,)),
    "attn_k.bias": ("self_attn.k_proj.bias", (32,)),
    "attn_v.bias": ("self_attn.v_proj.bias", (32,)),
    "attn_output.bias": ("self_attn.o_proj.bias", (64,)),
}
EMBEDDINGS = {"token_embd.weight": ("embed_tokens.weight", (64, 256))}
REDUCED = {"output.weight": ("lm_head.weight", (64, 64)), "d2t": ("d2t", (64,))}
MARKOV = {
    "markov_w1.weight": ("markov_head.markov_w1.weight", (8, 256)),
    "markov_w2.weight": ("markov_head.markov_w2.weight", (8, 256)),
}
CONFIDENCE = {
    "conf_proj.weight": ("confidence_head.proj.weight", (72, 1)),
    "conf_proj.bias": ("confidence_head.proj.bias", (1,)),
}
# beside GLOBALS and LAYER
TWO: dict[str, dict[str, Any]] = {
    "global": {
        "selector_predecessor.weight": ("candidate_selector.predecessor_codebook", (12, 256)),
        "selector_successor.weight": ("candidate_selector.successor_codebook", (12, 256)),
        "selector_hidden.weight": ("candidate_selector.hidden_projection.weight", (64, 12)),
    },
    "layer": {
        "attn_conv_base": ("attention_conv.base_kernel", (64, 2, 2)),
        "attn_conv_proj.weight": ("attention_conv.kernel_projection.weight", (64, 16)),
        "ffn_conv_base": ("mlp_conv.base_kernel", (64, 2, 2)),
        "ffn_conv_proj.weight": ("mlp_conv.kernel_projection.weight", (64, 16)),
    },
}
ADDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {},
    "swa-sinks": {"layer": SINKS},
    "gpt-oss": {"layer": BIASES},
    "llama3": {"global": {"rope_freqs.weight": ("", (8,))}},
    "own-head": {"global": EMBEDDINGS | {"output.weight": ("lm_head.weight", (64, 256))}},
    "reduced": {"global": REDUCED},
    "dflash2": TWO,
    "dspark": {"global": MARKOV | CONFIDENCE},
    "dspark-interleaved": {"global": MARKOV},
    "dspark-sinks": {"global": MARKOV, "layer": SINKS},
    "speculators": {
        "global": EMBEDDINGS
        | REDUCED
        | MARKOV
        | CONFIDENCE
        | {"markov_w2.weight": ("markov_head.markov_w2.weight", (8, 64))}
    },
    "speculators-dflash": {"global": EMBEDDINGS | REDUCED},
    "speculators-dflash2": {
        "global": EMBEDDINGS | TWO["global"] | {"output.weight": ("lm_head.weight", (64, 256))},
        "layer": TWO["layer"],
    },
    "muse-glimmer": {
        "global": {
            "enc.output_norm.weight": ("encoder.output_norm_enc.weight", (64,)),
            "fc.weight": ("encoder.fc.weight", (192, 64)),
        }
    },
}
GEMMA4_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", (64,)),
    "attn_q.weight": ("self_attn.q_proj.weight", (64, 128)),
    "attn_k.weight": ("self_attn.k_proj.weight", (64, 32)),
    "attn_output.weight": ("self_attn.o_proj.weight", (128, 64)),
    "attn_q_norm.weight": ("self_attn.q_norm.weight", (32,)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", (32,)),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", (64,)),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", (64,)),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (64,)),
    "layer_output_scale.weight": ("layer_scalar", (1,)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (64, 96)),
    "ffn_up.weight": ("mlp.up_proj.weight", (64, 96)),
    "ffn_down.weight": ("mlp.down_proj.weight", (96, 64)),
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


def table(plans: list[TensorPlan]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {plan.name: (plan.source, plan.shape) for plan in plans}
    assert len(found) == len(plans), "a tensor stands twice"
    return found


def in_layers(layer: dict[str, Any], n_layer: int) -> dict[str, Any]:
    return {
        f"blk.{index}.{name}": (f"layers.{index}.{source}", shape)
        for index in range(n_layer)
        for name, (source, shape) in layer.items()
    }


@pytest.mark.parametrize("name", ADDED)
def test_names_and_shapes(name: str) -> None:
    config = read(name)
    layer = in_layers(LAYER | ADDED[name].get("layer", {}), config.spec.n_layer)
    expected = GLOBALS | ADDED[name].get("global", {}) | layer
    assert table(plan_tensors(config, entries(name))) == expected


def test_names_and_shapes_of_a_gemma4_drafter() -> None:
    confidence = {
        key: (source.replace("confidence_head.proj", "confidence_proj"), shape)
        for key, (source, shape) in CONFIDENCE.items()
    }
    expected = GLOBALS | EMBEDDINGS | MARKOV | confidence | in_layers(GEMMA4_LAYER, 2)
    expected["rope_freqs.weight"] = ("", (16,))
    assert table(plan_tensors(read("gemma4"), entries("gemma4"))) == expected


@pytest.mark.parametrize("name", hf_drafters.VARIANTS)
def test_order_and_prefix_of_the_checkpoint_do_not_matter(name: str) -> None:
    tensors = entries(name)
    plans = plan_tensors(read(name), tensors)
    assert plan_tensors(read(name), dict(reversed(tensors.items()))) == plans
    prefixed = {
        f"model.{key}": TensorEntry(
            f"model.{key}", entry.dtype, entry.shape, entry.path, entry.offset, entry.n_bytes
        )
        for key, entry in tensors.items()
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
        if name == "own-head":  # without its head it would use the target's
            continue
        if name == "speculators-dflash2" and missing == "lm_head.weight":  # so would this one
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
    config = read("dspark", markov_rank=None)
    assert table(plan_tensors(config, entries("dspark")))["markov_w1.weight"][1] == (8, 256)


HEAD = (256, 64)


@pytest.mark.parametrize(
    ("name", "changes", "tensors", "kept"),
    [
        # the drafter's own head may come with the target's embeddings
        ("plain", {}, {"lm_head.weight": HEAD}, {"output.weight"}),
        # embeddings alone would become the head as well: only where the config says so
        ("plain", {}, {"embed_tokens.weight": HEAD}, {"token_embd.weight"}),
        ("plain", {"tie_word_embeddings": False}, {"embed_tokens.weight": HEAD}, set()),
        ("plain", {"has_embed_tokens": False}, {"embed_tokens.weight": HEAD}, set()),
        # the head of a DSpark drafter with the whole vocabulary is the target's
        ("dspark", {}, {"lm_head.weight": HEAD}, set()),
        (
            "dspark",
            {"tie_word_embeddings": False},
            {"lm_head.weight": HEAD, "embed_tokens.weight": HEAD},
            {"token_embd.weight", "output.weight"},
        ),
        (
            "dspark",
            {"train_embed_tokens": False},
            {"lm_head.weight": HEAD, "embed_tokens.weight": HEAD},
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
    assert {plan.source for plan in plan_tensors(config, found)} - {
        ""
    } == found.keys() - left.keys()


def test_trained_embeddings_without_a_head_are_refused() -> None:
    config = read("plain", tie_word_embeddings=False, train_embed_tokens=True)
    with pytest.raises(FileError, match=r"lm_head\.weight is missing"):
        plan_tensors(config, entries("plain", **{"embed_tokens.weight": HEAD}))


def test_copies_of_the_target_for_training_are_left_out() -> None:
    extra = {"verifier_norm.weight": (64,), "verifier_lm_head.weight": HEAD}
    found = entries("speculators", **extra)
    assert left_out(read("speculators"), found).keys() == {"t2d", *extra}
    plan_tensors(read("speculators"), found)
    with pytest.raises(FileError, match=r"2 not known: 'verifier_lm_head\.weight'"):
        plan_tensors(read("plain"), entries("plain", **extra))
