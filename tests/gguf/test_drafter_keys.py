"""Every key of a drafter's file is read into its spec, or named in the one line that refuses it."""

import pytest

import tiny_coder
from dflash_local.errors import FileError
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from gguf_files import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Value, edited

NAN, INFINITY = float("nan"), float("inf")

INTEGERS = (
    "dflash.embedding_length",
    "dflash.block_count",
    "dflash.feed_forward_length",
    "dflash.context_length",
    "dflash.attention.head_count",
    "dflash.block_size",
    "tokenizer.ggml.mask_token_id",
)
REQUIRED = (*INTEGERS, "dflash.target_layers", "dflash.attention.layer_norm_rms_epsilon")
OPTIONAL_INTEGERS = (
    "dflash.attention.head_count_kv",
    "dflash.attention.key_length",
    "dflash.attention.value_length",
    "dflash.rope.dimension_count",
    "dflash.rope.scaling.original_context_length",
)
NUMBERS = (
    "dflash.embedding_scale",
    "dflash.attention.scale",
    "dflash.attention.value_scale",
    "dflash.logit_scale",
    "dflash.final_logit_softcapping",
    "dflash.rope.freq_base",
    "dflash.rope.scaling.factor",
    "dflash.rope.scaling.attn_factor",
)


@pytest.fixture(scope="module")
def shipped() -> GgufFile:
    return GgufFile.open(tiny_coder.pair()[1])


def refusal(file: GgufFile, key: str, value: Value | None) -> str:
    with pytest.raises(FileError) as caught:
        read_drafter(edited(file, keys={key: value}))
    return str(caught.value)


def test_the_shipped_drafter(shipped: GgufFile) -> None:
    spec = read_drafter(shipped)
    assert spec.family == "dflash"
    assert (spec.block_size, spec.n_draft) == (16, 15)
    assert (spec.target_layers, spec.n_taps, spec.n_features) == ((2, 4, 6), 3, 1536)
    assert (spec.n_embd, spec.n_layer, spec.n_head, spec.n_head_kv) == (512, 3, 8, 2)
    assert (spec.head_dim, spec.n_ff, spec.n_vocab, spec.mask_token_id) == (64, 1536, 8192, 8191)
    assert (spec.sliding_window, spec.sliding_layers) == (0, (False, False, False))
    assert (spec.rope.freq_base, spec.rope.n_dims, spec.rope.scaling) == (1e6, 64, "none")
    assert spec.scales.rms_eps == pytest.approx(1e-6)
    assert (spec.scales.attention, spec.scales.embedding) == (0.125, 1.0)
    assert spec.context_length == 4096


def test_optional_keys_are_read(shipped: GgufFile) -> None:
    keys: dict[str, Value | None] = {
        "dflash.attention.sliding_window": (128, UINT32, None),
        "dflash.attention.sliding_window_pattern": ([True, True, False], ARRAY, BOOL),
        "dflash.rope.scaling.type": ("yarn", STRING, None),
        "dflash.rope.scaling.factor": (4.0, FLOAT32, None),
        "dflash.rope.scaling.original_context_length": (1024, UINT32, None),
        "dflash.rope.dimension_count": (32, UINT32, None),
        "dflash.rope.dimension_sections": ([16, 0, 0, 0], ARRAY, INT32),
        "dflash.embedding_scale": (2.0, FLOAT32, None),
        "dflash.attention.scale": (0.5, FLOAT32, None),
        "dflash.attention.value_scale": (0.25, FLOAT32, None),
        "dflash.logit_scale": (3.0, FLOAT32, None),
        "dflash.final_logit_softcapping": (30.0, FLOAT32, None),
        "dflash.hidden_activation": ("gelu_pytorch_tanh", STRING, None),
    }
    spec = read_drafter(edited(shipped, keys=keys))
    assert (spec.sliding_window, spec.sliding_layers) == (128, (True, True, False))
    rope = spec.rope
    assert (rope.scaling, rope.factor, rope.original_context) == ("yarn", 4.0, 1024)
    assert (rope.n_dims, rope.sections) == (32, (16, 0, 0, 0))
    scales = spec.scales
    assert (scales.embedding, scales.attention, scales.value) == (2.0, 0.5, 0.25)
    assert (scales.logit, scales.logit_softcap, scales.activation) == (3.0, 30.0, "gelu")


@pytest.mark.parametrize("key", REQUIRED)
def test_a_key_that_is_missing_or_of_another_type(shipped: GgufFile, key: str) -> None:
    assert f"'{key}' is missing" in refusal(shipped, key, None)
    assert key in refusal(shipped, key, ("4", STRING, None))
    assert key in refusal(shipped, key, (["1", "2"], ARRAY, STRING))
    assert key in refusal(shipped, key, (True, BOOL, None))


@pytest.mark.parametrize("key", INTEGERS + OPTIONAL_INTEGERS)
def test_an_integer_out_of_its_range(shipped: GgufFile, key: str) -> None:
    for value in (-4, 1 << 31, (1 << 64) - 1):
        assert key in refusal(shipped, key, (value, INT32, None))
    if key != "tokenizer.ggml.mask_token_id":
        assert key in refusal(shipped, key, (0, UINT32, None))


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none(shipped: GgufFile, key: str) -> None:
    for value in (NAN, INFINITY, -INFINITY, 1e300):
        assert key in refusal(shipped, key, (value, FLOAT32, None))
    assert key in refusal(shipped, key, (4, UINT32, None))
    assert key in refusal(shipped, key, ("high", STRING, None))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.architecture", None, "'general.architecture' is missing"),
        ("general.architecture", ("llama", STRING, None), "'llama', expected 'dflash'"),
        ("general.architecture", (1, UINT32, None), "expected string"),
        ("dflash.block_size", ("16", STRING, None), "is string ('16'), expected an integer"),
        ("dflash.block_size", (1, UINT32, None), "dflash.block_size is 1, expected at least 2"),
        ("dflash.block_size", (1 << 30, UINT32, None), "expected 2 to 256"),
        ("dflash.target_layers", ([], ARRAY, INT32), "expected the target's layers to tap"),
        ("dflash.target_layers", ([0, 2], ARRAY, INT32), "expected layer inputs from 1"),
        ("dflash.target_layers", ([1] * (1 << 20), ARRAY, INT32), "expected different layers"),
        ("dflash.target_layers", (["a"], ARRAY, STRING), "expected an array of integers"),
        ("dflash.target_layers", ([2, 4], ARRAY, INT32), "tensor fc.weight has the shape"),
        ("dflash.attention.head_count_kv", (3, UINT32, None), "expected a multiple of"),
        ("dflash.attention.key_length", (63, UINT32, None), "expected an even number"),
        ("dflash.attention.key_length", ([64, 32, 64], ARRAY, INT32), "expected an integer"),
        ("dflash.attention.causal", (1, UINT32, None), "causal"),
        ("dflash.attention.sliding_window", (64, UINT32, None), "sliding_window_pattern"),
        ("dflash.attention.sliding_window", (-1, INT32, None), "expected 0 or more tokens"),
        ("dflash.attention.sliding_window", (1 << 31, UINT32, None), "expected 0 or more tokens"),
        ("dflash.attention.layer_norm_rms_epsilon", (NAN, FLOAT32, None), "finite"),
        ("dflash.attention.layer_norm_rms_epsilon", (0.0, FLOAT32, None), "expected 0 < eps"),
        ("dflash.rope.freq_base", (0.0, FLOAT32, None), "expected a positive number"),
        ("dflash.rope.dimension_count", (7, UINT32, None), "expected an even number"),
        ("dflash.rope.dimension_count", (66, UINT32, None), "is 66, expected 2 to 64"),
        ("dflash.rope.dimension_sections", ([8, 8], ARRAY, INT32), "expected [n, 0, 0, 0]"),
        ("dflash.rope.scaling.factor", (-2.0, FLOAT32, None), "expected a positive number"),
        ("dflash.rope.scaling.type", ("longrope", STRING, None), "expected none, linear or yarn"),
        ("dflash.hidden_activation", ("relu", STRING, None), "'relu', expected one of silu"),
        ("dflash.embedding_length", (256, UINT32, None), "[512], expected [256]"),
        ("dflash.block_count", (2, UINT32, None), "is beyond dflash.block_count 2"),
        ("dflash.block_count", (4, UINT32, None), "blk.3.attn_norm.weight is missing"),
        ("tokenizer.ggml.mask_token_id", (8192, UINT32, None), "is 8192, expected 0 to 8191"),
    ],
)
def test_a_bad_key(shipped: GgufFile, key: str, value: Value | None, reason: str) -> None:
    assert reason in refusal(shipped, key, value)


@pytest.mark.parametrize("pattern", [[], [True] * 2, [True] * 4])
def test_a_window_needs_a_flag_for_each_layer(shipped: GgufFile, pattern: list[bool]) -> None:
    keys: dict[str, Value | None] = {
        "dflash.attention.sliding_window": (8, UINT32, None),
        "dflash.attention.sliding_window_pattern": (pattern, ARRAY, BOOL),
    }
    with pytest.raises(FileError, match=r"sliding_window_pattern .* expected 3 bools"):
        read_drafter(edited(shipped, keys=keys))


def test_the_number_of_tokens_may_come_from_the_target(shipped: GgufFile) -> None:
    bare = edited(shipped, keys={"tokenizer.ggml.tokens": None})
    assert read_drafter(bare, n_vocab=8192).n_vocab == 8192
    with pytest.raises(FileError, match="n_vocab unknown"):
        read_drafter(bare)
