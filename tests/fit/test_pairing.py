"""A drafter runs with the target that it was made for; every other pairing is one clear line."""

from collections.abc import Callable

import gguf
import pytest

import tiny_coder
from dflash_local.errors import FileError, InputError, PairError
from dflash_local.fit.architectures import RECURRENT_ARCHITECTURES, TAPPED_ARCHITECTURES
from dflash_local.fit.inspection import inspect_file
from dflash_local.fit.pairing import check_pair, check_taps, check_target
from dflash_local.gguf.file import GgufFile
from gguf_files import ARRAY, INT32, STRING, UINT32, Value, edited, of_architecture

Keys = dict[str, Value | None]


@pytest.fixture(scope="module")
def target() -> GgufFile:
    return GgufFile.open(tiny_coder.pair()[0])


@pytest.fixture(scope="module")
def drafter() -> GgufFile:
    return GgufFile.open(tiny_coder.pair()[1])


def mismatch(target: GgufFile, drafter: GgufFile) -> str:
    """The reason why the two do not fit."""
    with pytest.raises(PairError) as caught:
        check_pair(target, drafter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_pair_fits(target: GgufFile, drafter: GgufFile) -> None:
    assert check_pair(target, drafter).target_layers == (2, 4, 6)


def test_target_and_drafter_in_each_others_place(target: GgufFile, drafter: GgufFile) -> None:
    with pytest.raises(FileError, match=r"a DFlash drafter .* given as the target"):
        check_pair(drafter, drafter)
    with pytest.raises(FileError, match=r"'bert', expected 'dflash'"):
        check_pair(target, of_architecture(target, "bert"))


@pytest.mark.parametrize("name", ["dflash-draft", "gemma4-dflash-draft"])
def test_a_drafter_of_an_old_fork_is_told_by_name(
    target: GgufFile, drafter: GgufFile, name: str
) -> None:
    """As a drafter, as a target, and where only looked at."""
    old = of_architecture(drafter, name)
    calls: list[Callable[[], object]] = [
        lambda: check_pair(target, old),
        lambda: check_pair(old, drafter),
        lambda: inspect_file(old),
    ]
    for call in calls:
        with pytest.raises(FileError, match=f"old fork .*'{name}'.* convert") as caught:
            call()
        assert str(caught.value).count("\n") == 0


def test_a_target_that_writes_no_text(target: GgufFile) -> None:
    with pytest.raises(FileError, match=r"'bert', expected a language model .* serves embedd"):
        check_target(of_architecture(target, "bert"))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"qwen3.block_count": None}, "'qwen3.block_count' is missing"),
        ({"qwen3.block_count": (0, UINT32, None)}, "qwen3.block_count is 0, expected 1 to 512"),
        (
            {"qwen3.attention.sliding_window": (2**32 - 1, UINT32, None)},
            "sliding_window is 4294967295, expected 0 to 16777216",
        ),
        (
            {"qwen3.rope.dimension_count": (0, UINT32, None)},
            "rope.dimension_count is 0, expected 1 to 131072",
        ),
        (
            {"qwen3.attention.key_length": (1 << 22, UINT32, None)},
            "key_length is 4194304, expected 1 to 131072",
        ),
        *(
            (
                {f"qwen3.attention.{name}": (0, UINT32, None)},
                f"qwen3.attention.{name} is 0, expected 1 to 131072",
            )
            for name in ("key_length", "value_length", "key_length_mla", "value_length_swa")
        ),
        (
            {"qwen3.attention.head_count_kv": (0, UINT32, None)},
            "qwen3.attention.head_count_kv is 0, expected 1 or more",
        ),
        ({"qwen3.embedding_length": (256, UINT32, None)}, "has the shape [512, 8192], expected"),
        ({"general.type": ("adapter", STRING, None)}, "general.type is 'adapter'"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        (
            {"qwen3.attention.key_length": (["a"], ARRAY, STRING)},
            "'qwen3.attention.key_length' is ['a'], expected a whole number",
        ),
        (
            {"qwen3.feed_forward_length": ([8, -1], ARRAY, INT32)},
            "'qwen3.feed_forward_length' is [8, -1], expected a whole number of 32 bits, or",
        ),
    ],
)
def test_a_bad_target(target: GgufFile, keys: Keys, reason: str) -> None:
    with pytest.raises(FileError) as caught:
        check_target(edited(target, keys=keys))
    assert reason in str(caught.value)


def test_another_hidden_size(target: GgufFile, drafter: GgufFile) -> None:
    narrower = edited(
        target,
        keys={"qwen3.embedding_length": (256, UINT32, None)},
        tensors={"token_embd.weight": ("F32", (256, 8192))},
    )
    message = mismatch(narrower, drafter)
    assert "hidden size (embedding_length) is 512 in the drafter" in message
    assert "256 in the target" in message and "trained for this target" in message


def test_taps_beyond_the_target(target: GgufFile, drafter: GgufFile) -> None:
    # the output of the last layer is no layer's input
    for last, fits in ((7, True), (8, False), (60, False)):
        keys: Keys = {"dflash.target_layers": ([2, 4, last], ARRAY, INT32)}
        other = edited(drafter, keys=keys)
        if fits:
            check_pair(target, other)
        else:
            message = mismatch(target, other)
            assert f"[2, 4, {last}]" in message and "layers 0 to 7" in message


def test_another_tokenizer(target: GgufFile, drafter: GgufFile) -> None:
    def with_key(name: str, value: Value) -> GgufFile:
        return edited(drafter, keys={name: value})

    message = mismatch(target, with_key("tokenizer.ggml.model", ("llama", STRING, None)))
    assert "tokenizer model (tokenizer.ggml.model) is 'llama'" in message
    message = mismatch(target, with_key("tokenizer.ggml.pre", ("llama-bpe", STRING, None)))
    assert "(tokenizer.ggml.pre) is 'llama-bpe'" in message and "'qwen2' in the target" in message

    tokens = list(target.get("tokenizer.ggml.tokens"))
    more = with_key("tokenizer.ggml.tokens", ([*tokens, "one more"], ARRAY, STRING))
    assert "vocabulary size is 8193 in the drafter" in mismatch(target, more)
    tokens[7] = "another"
    other = with_key("tokenizer.ggml.tokens", (tokens, ARRAY, STRING))
    assert "token 7 is 'another' in the drafter" in mismatch(target, other)


@pytest.mark.parametrize("key", ["tokenizer.ggml.pre", "tokenizer.ggml.tokens"])
def test_a_drafter_may_lack_a_tokenizer_or_its_name(
    target: GgufFile, drafter: GgufFile, key: str
) -> None:
    assert check_pair(target, edited(drafter, keys={key: None})).n_vocab == 8192


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", ()),
        ("deepseek2", ()),
        ("qwen35", ()),
        ("minimax-01", ("'minimax-01'", "recurrent", "plain decoding")),
        ("mamba", ("'mamba'", "recurrent", "plain decoding")),
        ("nemotron_h", ("hidden states",)),
        ("deepseek4", ("'deepseek4'", "recurrent", "plain decoding")),
        ("gemma3n", ("'gemma3n'", "hidden states", "plain decoding")),
    ],
)
def test_targets_of_other_architectures(
    target: GgufFile, drafter: GgufFile, name: str, words: tuple[str, ...]
) -> None:
    """Those that are not refused are drafted for."""
    other = of_architecture(target, name)
    if words:
        message = mismatch(other, drafter)
        assert all(word in message for word in words)
    else:
        check_pair(other, drafter)


def test_plain_decoding_needs_no_taps(target: GgufFile) -> None:
    check_target(of_architecture(target, "mamba"))
    check_target(of_architecture(target, "gemma3n"))


def test_layers_that_can_be_tapped(target: GgufFile) -> None:
    check_taps(target, ())
    check_taps(target, (1, 7))
    for layer in (-1, 0, 8):
        with pytest.raises(InputError, match=f"input of layer {layer}; expected 1 to 7"):
            check_taps(target, (2, layer))
    more = edited(target, keys={"qwen3.nextn_predict_layers": (1, UINT32, None)})
    with pytest.raises(InputError, match="expected 1 to 6"):
        check_taps(more, (7,))
    with pytest.raises(InputError, match="gemma3n"):
        check_taps(of_architecture(target, "gemma3n"), (2,))


def test_the_architectures_are_names_of_the_gguf_package_or_newer() -> None:
    newer = {"bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "minimax-01", "muse-glimmer"}
    newer |= {"cohere2moe", "qwen4exp"}
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert (TAPPED_ARCHITECTURES | RECURRENT_ARCHITECTURES) - known <= newer
