"""A drafter's config.json becomes llama.cpp's keys, or a line that says what is wrong with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_configs
from dflash_local.convert.config.drafter_config import DraftConfig, read_config
from dflash_local.convert.config.target_link import TargetFacts
from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from hf_keys import EXPECTED, family_of, typed


def read(name: str, **changes: Any) -> DraftConfig:
    raw = hf_configs.config(name) | changes
    return read_config(raw, target=hf_configs.target_facts(name))


def keys(config: DraftConfig) -> dict[str, tuple[Any, str]]:
    head = ["conf_proj.weight"] if config.states_confidence else []
    found: dict[str, tuple[Any, str]] = {
        key.name.removeprefix("dflash."): (key.value, key.type_name)
        for key in config.keys_for(head)
    }
    assert len(found) == len(config.keys_for(head)), "a key stands twice"
    return found


@pytest.mark.parametrize("name", hf_configs.VARIANTS)
def test_the_keys_are_those_of_llama_cpp(name: str) -> None:
    config = read(name)
    assert keys(config) == EXPECTED[name]
    assert config.family == family_of(name)
    assert config.spec.mask_token_id == 255
    assert config.spec.target_layers == (2, 4, 6)


def nested(name: str, **fields: Any) -> dict[str, Any]:
    return {"dflash_config": dict(hf_configs.config(name)["dflash_config"], **fields)}


NO_ANCHOR = nested("dspark-sinks", sample_from_anchor=None) | {"sample_from_anchor": None}
WINDOW: dict[str, Any] = {"sliding_window": 9, "use_sliding_window": True, "layer_types": None}
LAYERS = hf_configs.config("speculators-dflash")["transformer_layer_config"]


def layers(*kinds: str) -> dict[str, Any]:
    """The fields of speculators' layers of these kinds."""
    window: dict[str, Any] = {"sliding_window": 32, "use_sliding_window": True}
    window |= {"layer_types": [f"{kind}_attention" for kind in kinds]}
    return {"transformer_layer_config": LAYERS | window}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("plain", {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_activation": "gelu_pytorch_tanh"}),
        ("plain", {"block_size": None}, {"block_size": 16}),
        # windows as `transformers` derives them
        (
            "plain",
            WINDOW | {"max_window_layers": 1},
            {"attention.sliding_window_pattern": (False, True)},
        ),
        (
            "plain",
            {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2},
            {"attention.sliding_window": None},
        ),
        # in speculators, layers with a window are causal
        ("speculators-dflash", layers("sliding", "sliding"), {"attention.causal": True}),
        ("speculators-dflash", layers("full", "full"), {"attention.causal": None}),
        (
            "speculators-dflash",
            layers("sliding", "full") | {"sliding_window_non_causal": True},
            {"attention.causal": None},
        ),
        # which row drafts
        ("dspark-sinks", NO_ANCHOR, {"sample_from_anchor": False}),
        ("dspark-sinks", NO_ANCHOR | {"dspark_bonus_anchor": None}, {"sample_from_anchor": True}),
        ("speculators", {"sample_from_anchor": True}, {"sample_from_anchor": True}),
    ],
)
def test_what_a_config_states_or_leaves_out_decides(
    name: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = keys(read(name, **changes))
    for key, value in expected.items():
        assert found.get(key) == (None if value is None else typed(value))


def test_sizes_that_are_left_out_are_derived_and_not_written() -> None:
    config = read("plain", head_dim=None, num_key_value_heads=None)
    assert (config.spec.head_dim, config.spec.n_head_kv) == (16, 4)
    assert not {"attention.key_length", "attention.head_count_kv"} & keys(config).keys()


def test_the_vocabulary_may_be_stated_by_the_target_alone() -> None:
    assert "vocab_size" not in hf_configs.config("muse-glimmer")
    assert read("muse-glimmer").spec.n_vocab == 256
    with pytest.raises(InputError, match="vocab_size is missing"):
        read_config(hf_configs.config("muse-glimmer"), target=TargetFacts())


def test_embeddings_are_scaled_as_a_gemma_target_scales_them() -> None:
    target = replace(hf_configs.target_facts("plain"), architecture="gemma4")
    raw = hf_configs.config("plain")
    assert keys(read_config(raw, target=target))["embedding_scale"] == (8.0, "float32")
    stated = raw | {"input_embedding_scale": 1.0}
    assert keys(read_config(stated, target=target))["embedding_scale"] == (1.0, "float32")
    assert "embedding_scale" not in keys(read("plain"))


def test_a_gguf_target_states_what_its_config_would(pair: tuple[Path, Path]) -> None:
    facts = TargetFacts.of(GgufFile.open(pair[0]))
    assert facts == TargetFacts("qwen3", 8, 512, 8192, uses_mrope=False)
    raw = hf_configs.config("plain", n_embd=512, n_vocab=8192)
    assert read_config(raw, target=facts).spec.n_vocab == 8192
    with_sections = replace(facts, uses_mrope=True)
    assert "rope.dimension_sections" in keys(read_config(raw, target=with_sections))


def test_an_amplitude_that_llama_cpp_would_not_use_is_written_where_it_does() -> None:
    scaling = dict(hf_configs.config("yarn")["rope_scaling"], attention_factor=1.0)
    found = keys(read("yarn", rope_scaling=scaling))
    assert found["rope.scaling.yarn_attn_factor"] == (1.0, "float32")
    # it multiplies 1 + 0.1 ln(64)
    assert found["rope.scaling.attn_factor"][0] * 1.4158883 == pytest.approx(1.0)
    usual = dict(scaling, attention_factor=1.4158883083359672)
    assert "rope.scaling.attn_factor" not in keys(read("yarn", rope_scaling=usual))


def test_speculators_drafters_are_known_by_their_type_alone() -> None:
    for name in ("speculators", "speculators-dflash", "speculators-dflash2"):
        assert keys(read(name, architectures=None)) == EXPECTED[name]


def test_a_dspark_layout_without_heads_is_plain_dflash_from_the_anchor() -> None:
    config = read("dspark-headless")
    assert config.spec.family == "dflash"
    assert keys(config)["sample_from_anchor"] == (True, "bool")
    (note,) = config.notes
    assert "one position late" in note
    assert read("dspark").spec.family == "dspark"


def test_biases_are_told_of() -> None:
    config = read("gpt-oss")
    assert config.spec.attention_bias
    (note,) = config.notes
    assert "biases" in note and "stock llama.cpp does not load" in note
    assert read("plain").notes == ()


def scaling(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": fields}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {"attention_bias": 1}, "attention_bias is 1, expected true or false"),
    ("plain", nested("plain", attention_bias=True), "dflash_config.attention_bias is True"),
    ("plain", {"num_experts": 8}, "num_experts is 8.*mixture of experts"),
    ("plain", {"mlp_bias": True}, "mlp_bias"),
    ("plain", {"kv_lora_rank": 512}, "kv_lora_rank"),
    ("plain", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("plain", {"hidden_size": None}, "hidden_size is missing"),
    ("plain", {"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
    ("plain", {"hidden_size": True}, "hidden_size is True"),
    ("plain", {"hidden_size": 0}, "hidden_size is 0"),
    ("plain", {"num_hidden_layers": 513}, "num_hidden_layers is 513, expected .* 512"),
    ("plain", {"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ("plain", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ("plain", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
    ("plain", {"rope_theta": float("nan")}, "rope_theta is nan"),
    ("plain", {"num_key_value_heads": 3}, "a multiple of dflash.attention.head_count_kv, 3"),
    ("plain", {"head_dim": 15}, "head_dim is 15, expected an even"),
    ("plain", {"v_head_dim": 8}, "v_head_dim is 8, expected head_dim, 16"),
    ("plain", {"block_size": 1}, "block_size is 1"),
    ("plain", {"hidden_act": "relu2"}, "hidden_act is 'relu2', expected 'silu'"),
    ("plain", {"vocab_size": 200}, "mask_token_id is 255, expected 0 to 199"),
    ("plain", {"dflash_config": None}, "target_layer_ids is missing"),
    ("plain", {"dflash_config": [1]}, r"dflash_config is \[1\], expected a JSON object"),
    ("plain", nested("plain", mask_token_id=None), "mask_token_id is missing"),
    ("plain", nested("plain", mask_token_id=256), "mask_token_id is 256, expected 0 to 255"),
    ("plain", nested("plain", target_layer_ids=[]), "target_layer_ids is missing"),
    ("plain", nested("plain", target_layer_ids=[1, 8]), r"\[1, 8\].*a target that has 8"),
    ("plain", nested("plain", target_layer_ids=[-1]), r"target_layer_ids is \[-1\]"),
    ("plain", nested("plain", target_layer_ids=[1, 1]), "expected different layers"),
    ("plain", nested("plain", gate="x"), "dflash_config.gate is 'x'"),
    ("plain", nested("plain", projector_type="domino"), "projector_type is 'domino'"),
    ("plain", nested("plain", conv_kernel_size=2), "conv_kernel_size is 2, expected none"),
    ("plain", {"markov_rank": 8}, "markov_rank is 8, expected none"),
    ("plain", {"sample_from_anchor": True}, "sample_from_anchor is True"),
    ("plain", {"target_hidden_size": 32}, "target_hidden_size is 32, expected .* 64"),
    ("plain", {"layer_types": ["full_attention"]}, "layer_types is .*2 times"),
    ("plain", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
    ("plain", {"draft_vocab_size": 257}, "draft_vocab_size is 257, expected at most"),
    ("plain", {"partial_rotary_factor": 0.3}, "partial_rotary_factor is 0.3"),
    ("plain", scaling(rope_type="longrope", factor=2.0), "rope_scaling.rope_type is 'longrope'"),
    ("plain", scaling(rope_type="dynamic", factor=2.0), "rope_scaling.rope_type is 'dynamic'"),
    ("plain", scaling(type="su"), "rope_scaling.type is 'su'"),
    ("plain", scaling(rope_type="linear"), "rope_scaling.factor is missing"),
    ("plain", scaling(rope_type="yarn", factor=4.0), "original_max_position_embeddings is missing"),
    ("plain", scaling(rope_type="default", short_factor=[1.0]), "rope_scaling.short_factor"),
    ("plain", scaling(mrope_section=[1, 2, 3, 4, 5]), "mrope_section"),
    (
        "plain",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
        "rope_parameters.sliding_attention .*one RoPE",
    ),
    ("sliding", {"rope_local_base_freq": 10000.0}, "rope_local_base_freq"),
    (
        "yarn",
        {"rope_scaling": dict(hf_configs.config("yarn")["rope_scaling"], beta_fast=16.0)},
        "rope_scaling.beta_fast is 16.0, expected 32",
    ),
    (
        "gpt-oss",
        {
            "rope_scaling": hf_configs.config("gpt-oss")["rope_scaling"] | {"truncate": False},
            "partial_rotary_factor": 0.5,
        },
        "rope_scaling.truncate is False, expected true or none beside partial_rotary_factor",
    ),
    (
        "gpt-oss",
        {
            "rope_scaling": hf_configs.config("gpt-oss")["rope_scaling"] | {"truncate": False},
            "rope_theta": 1.0,
        },
        "rope_theta is 1.0, expected more than 1",
    ),
    ("llama3", {"partial_rotary_factor": 0.5}, "rope_type is 'llama3'.*partial_rotary_factor"),
    ("dspark-interleaved", {"partial_rotary_factor": 0.5}, "rope_is_neox_style is False"),
    ("swa-sinks", nested("swa-sinks", swa_window_size=0) | {"sliding_window": None}, "swa_window"),
    ("dflash2", nested("dflash2", selector_rank=None), "dflash_config.selector_rank is missing"),
    ("dflash2", nested("dflash2", conv_group_size=24), "conv_group_size is 24, expected a divisor"),
    ("dflash2", nested("dflash2", selector_top_k=8), "selector_top_k is 8"),
    ("dflash2", nested("dflash2", selector_vocab_size=99), "selector_vocab_size is 99"),
    ("plain", WINDOW | {"max_window_layers": None}, "layer_types is missing"),
    ("speculators-dflash", layers("sliding", "full"), "sliding_window_non_causal is False"),
    ("speculators", {"speculators_model_type": "dflash"}, "beside the architecture DSparkDraftMod"),
    ("dspark", {"markov_head_type": "gated"}, "markov_head_type is 'gated', expected 'vanilla'"),
    ("gemma4", {"attention_k_eq_v": False}, "attention_k_eq_v"),
    ("gemma4", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("gemma4", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ("gemma4", {"enable_moe_block": True}, "enable_moe_block is True.*mixture of experts"),
    ("gemma4", {"global_head_dim": None}, "global_head_dim is missing"),
    ("gemma4", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("gemma4", {"draft_vocab_size": 64}, "draft_vocab_size is 64"),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_parameters.full_attention.rope_type is 'yarn'",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_known_is_refused_by_its_field(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(name, **changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


NO_DRAFTER: list[tuple[object, str]] = [
    ({"architectures": ["Qwen3ForCausalLM"]}, "a Qwen3ForCausalLM model, no drafter"),
    ({"model_type": "llama"}, "a 'llama' model without architectures, no drafter"),
    ({}, "neither architectures nor model_type is given"),
    ([1, 2], r"holds \[1, 2\], expected a JSON object"),
    (None, "holds None, expected a JSON object"),
    ({"architectures": "DFlashDraftModel"}, "architectures is 'DFlashDraftModel', expected a list"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "a drafter of another kind"),
    ({"architectures": ["Qwen4DSparkModel"]}, "'Qwen4DSparkModel': a drafter of another kind"),
    ({"architectures": ["DeepseekV4DSparkModel"]}, "a DSpark drafter of DeepSeek-V4 stages"),
    (
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
        "'DeepseekV4ForCausalLM': a DSpark drafter of DeepSeek-V4 stages",
    ),
    ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3': another kind"),
    (
        {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash2"},
        "nothing beside the architecture DFlashDraftModel",
    ),
    (
        {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dspark"},
        "nothing beside the architecture DFlashDraftModel",
    ),
]


@pytest.mark.parametrize(("raw", "message"), NO_DRAFTER)
def test_another_model_is_called_by_its_name(raw: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_config(raw, target=TargetFacts())
    assert "expected" in str(caught.value)


def test_a_target_of_another_width() -> None:
    target = replace(hf_configs.target_facts("plain"), n_embd=128)
    with pytest.raises(InputError, match="target is 128, expected the drafter's hidden_size, 64"):
        read_config(hf_configs.config("plain"), target=target)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["default", "yarn", "llama3", "full_attention", "sliding_attention"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["full_attention", "rope_type", "factor", "type", "rope_theta", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {field for name in hf_configs.VARIANTS for field in hf_configs.config(name)}
    | {
        "transformer_layer_config",
        "text_config",
        "rope_parameters",
        "original_max_position_embeddings",
    }
)


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(hf_configs.VARIANTS)),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    inner=st.dictionaries(
        st.sampled_from(sorted(hf_configs.config("dflash2")["dflash_config"])), JSON
    ),
)
def test_any_change_of_a_config_is_read_or_refused(
    name: str, changes: dict[str, Any], inner: dict[str, Any]
) -> None:
    raw = hf_configs.config(name) | changes
    if inner and isinstance(raw.get("dflash_config"), dict):
        raw["dflash_config"] = raw["dflash_config"] | inner
    reads_or_refuses(raw, hf_configs.target_facts(name))


@given(raw=JSON)
def test_any_json_is_read_or_refused(raw: object) -> None:
    reads_or_refuses(raw, TargetFacts())


def reads_or_refuses(raw: object, target: TargetFacts) -> None:
    try:
        config = read_config(raw, target=target)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert config.spec.mask_token_id < config.spec.n_vocab
        config.rope.frequency_factors()
