"""The PyTorch reference is right: it equals llama.cpp's own drafter, and it drafts well."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as api
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dflash_local import demo
from dflash_local.target.target import Target
from gguf_files import Tensor, changed, dequantised
from reference import Reference
from synthetic import write_drafter, write_target

torch.set_num_threads(1)  # the products are small

GGML_TYPE_F32 = 0
FLASH_ATTENTION_OFF = 0

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.freq_base": 10000.0,
}
DRAFTERS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "five taps": {"target_layers": (0, 1, 2, 3, 4), "n_layer": 3},
    "one head of keys": {"n_head": 8, "n_head_kv": 1, "head_dim": 32, "block_size": 16},
    "window in some layers": {"sliding_window": 10, "n_layer": 3, "pattern": (True, False, True)},
    "window inside the block": {"sliding_window": 3},
    "own ends": {"own_head": True, "own_embeddings": True},
    "own embeddings, tied": {"own_embeddings": True},
    "own head": {"own_head": True},
    "norms after": {"post_norms": True},
    "scale of a layer": {"layer_scale": True},
    "attention sinks": {"sinks": True},
    "values from keys": {"shared_kv": True},
    "partial rope": {"rope_dimensions": 8},
    "rope factors": {"rope_factors": True},
    "linear rope scaling": {"extra": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "yarn": {"extra": YARN},
    "rope magnitude": {"extra": YARN | {"rope.scaling.attn_factor": 1.3}},
    "gelu": {"extra": {"hidden_activation": "gelu"}},
    "scale of embeddings": {"extra": {"embedding_scale": 3.0}},
    "scale of scores": {"extra": {"attention.scale": 0.4}},
    "scale of attention": {"extra": {"attention.value_scale": 0.4}},
    "scale and cap of logits": {
        "extra": {"logit_scale": 0.5, "final_logit_softcapping": 3.0},
    },
}


class LlamaCppDrafter:
    """The `dflash` architecture of llama.cpp in a context of its own, with an F32 cache."""

    def __init__(self, drafter: Path, target: Path, *, n_ctx: int = 256) -> None:
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        self._models = [
            api.llama_model_load_from_file(str(path).encode(), model) for path in (target, drafter)
        ]
        assert all(self._models)
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = GGML_TYPE_F32
        params.flash_attn_type = FLASH_ATTENTION_OFF
        params.offload_kqv = params.op_offload = False  # a GPU rounds more coarsely
        target_context = api.llama_init_from_model(self._models[0], params)
        params.ctx_other = target_context
        self._context = api.llama_init_from_model(self._models[1], params)
        self._contexts = [target_context, self._context]
        assert all(self._contexts)
        api.llama_set_causal_attn(self._context, False)
        vocab = api.llama_model_get_vocab(self._models[0])
        self._n_vocab = api.llama_vocab_n_tokens(vocab)
        self._mask_token = self._n_vocab - 1
        self._length = 0

    def inject(self, features: NDArray[np.float32]) -> None:
        n_rows, width = features.shape
        batch = self._batch(n_rows, width)
        ctypes.memmove(batch.embd, np.ascontiguousarray(features).ctypes.data, features.nbytes)
        self._decode(batch)
        self._length += n_rows

    def draft(self, anchor: int, block_size: int) -> torch.Tensor:
        """Log-probabilities [block_size - 1, n_vocab], float64."""
        batch = self._batch(block_size, 0)
        for i in range(block_size):
            batch.token[i] = anchor if i == 0 else self._mask_token
            batch.logits[i] = True
        self._decode(batch)
        rows = [
            np.ctypeslib.as_array(
                api.llama_get_logits_ith(self._context, i), (self._n_vocab,)
            ).copy()
            for i in range(1, block_size)
        ]
        memory = api.llama_get_memory(self._context)
        api.llama_memory_seq_rm(memory, 0, self._length, -1)
        return torch.log_softmax(torch.from_numpy(np.stack(rows)).double(), dim=-1)

    def close(self) -> None:
        for context in reversed(self._contexts):
            api.llama_free(context)
        for model in self._models:
            api.llama_model_free(model)

    def _batch(self, n_rows: int, width: int) -> Any:
        batch = api.llama_batch_init(n_rows, width, 1)
        batch.n_tokens = n_rows
        for i in range(n_rows):
            batch.pos[i] = self._length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = False
        return batch

    def _decode(self, batch: Any) -> None:
        assert api.llama_decode(self._context, batch) == 0
        api.llama_batch_free(batch)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return write_target(path, n_layer=5)


@pytest.fixture(scope="module", autouse=True)
def _backend() -> Iterator[None]:
    api.llama_backend_init()
    yield


def random_features(n_rows: int, reference: Reference, seed: int = 0) -> NDArray[np.float32]:
    shape = (n_rows, reference.feature_size)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_equals_the_drafter_of_llama_cpp(
    options: Mapping[str, Any], target: Path, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", target, **options)
    reference = Reference(path, target, dtype=torch.float64)
    theirs = LlamaCppDrafter(path, target)
    features = random_features(40, reference)
    # Both in F32, logits of magnitude 10; ggml looks GELU up in a table of halves.
    tolerance = 0.02 if "gelu" in str(options) else 1e-4
    try:
        for begin, end in ((0, 33), (33, 40)):
            reference.inject(0, features[begin:end])
            theirs.inject(features[begin:end])
            # llama.cpp leaves scale and cap of logits to the sampler
            ours = torch.log_softmax(reference.logits(0, anchor=5)[1:], dim=-1)
            difference = (ours - theirs.draft(5, reference.block_size)).abs().max()
            assert difference < tolerance
    finally:
        theirs.close()


@pytest.mark.slow
def test_every_option_changes_the_draft(target: Path, tmp_path: Path) -> None:
    """Else the comparison with llama.cpp would not show an option that both ignore."""
    drafts = {}
    for name in (
        "norms after",
        "scale of a layer",
        "attention sinks",
        "values from keys",
        "partial rope",
        "rope factors",
        "linear rope scaling",
        "yarn",
        "rope magnitude",
        "gelu",
        "scale of embeddings",
        "scale of scores",
        "scale of attention",
        "scale and cap of logits",
        "window inside the block",
        "own head",
        "own embeddings, tied",
        "plain",
    ):
        path = write_drafter(tmp_path / "drafter.gguf", target, **DRAFTERS[name])
        reference = Reference(path, target)
        reference.inject(0, random_features(40, reference))
        drafts[name] = reference.draft(0, anchor=5)
    names = list(drafts)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert (drafts[one] - drafts[other]).abs().max() > 0.1, (one, other)


def test_a_dequantised_file_drafts_the_same(target: Path, tmp_path: Path) -> None:
    small = write_drafter(tmp_path / "small.gguf", target, quant="Q8_0")
    plain = dequantised(small, tmp_path / "plain.gguf")
    assert plain.stat().st_size > 2 * small.stat().st_size
    ours, theirs = Reference(small, target), LlamaCppDrafter(plain, target)
    try:
        features = random_features(20, ours)
        ours.inject(0, features)
        theirs.inject(features)
        assert (ours.draft(0, 7) - theirs.draft(7, ours.block_size)).abs().max() < 1e-4
    finally:
        theirs.close()


def test_a_bias_of_the_values_is_one_of_the_output(target: Path, tmp_path: Path) -> None:
    """Attention's weights sum to one, so it passes through the output projection as it is.

    Were it left out of injected rows or of the block, it would not.
    """
    path = write_drafter(tmp_path / "values.gguf", target, biases=("v",))

    def move(tensors: dict[str, Tensor]) -> None:
        for block in ("blk.0.", "blk.1."):
            values, _ = tensors.pop(block + "attn_v.bias")
            heads = values.reshape(2, 16).repeat(2, axis=0).ravel()  # 4 heads share 2
            bias = tensors[block + "attn_output.weight"][0] @ heads
            tensors[block + "attn_output.bias"] = (bias, gguf.GGMLQuantizationType.F32)

    moved = changed(path, tmp_path / "output.gguf", tensors=move)
    drafts = []
    for file in (path, moved):
        reference = Reference(file, target, dtype=torch.float64)
        reference.inject(0, random_features(30, reference))
        drafts.append(reference.draft(0, anchor=5))
    assert (drafts[0] - drafts[1]).abs().max() < 1e-4


@pytest.mark.slow
def test_drafts_of_real_hidden_states_are_accepted() -> None:
    """Six prompts, 64 tokens each, greedy: 3.1 tokens a round.

    With the taps in reverse order it is 1.5, with each row one position late 1.8, with none 1.1.
    """
    target_path, drafter_path = demo.pair()
    reference = Reference(drafter_path, target_path)
    prompts = demo.prompts()
    emitted = rounds = 0
    with Target.load(target_path, n_ctx=512, n_threads=1, tapped_layers=(2, 4, 6)) as target:
        for prompt in prompts["chat"][:3] + prompts["code"][:3]:
            answer, features = greedy_answer(target, prompt, n_tokens=64)
            n_prompt = len(features) - len(answer) + 1
            reference.clear(0)
            reference.inject(0, features[:n_prompt])
            at = 0
            while at < len(answer) - 1:
                drafted = reference.draft(0, answer[at]).argmax(dim=-1).tolist()
                n = 1 + length_of_agreement(drafted, answer[at + 1 :])
                reference.inject(0, features[n_prompt + at : n_prompt + at + n])
                at, emitted, rounds = at + n, emitted + n, rounds + 1
    assert emitted / rounds > 2.8


def length_of_agreement(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def greedy_answer(
    target: Target, prompt: str, n_tokens: int
) -> tuple[list[int], NDArray[np.float32]]:
    """The answer, and the context features of all rows before its last token."""
    tokens = target.vocabulary.tokenize(prompt)
    target.clear(0)
    position = 0
    answer: list[int] = []
    features: list[NDArray[np.float32]] = []
    while len(answer) < n_tokens and not (answer and target.vocabulary.ends_text(answer[-1])):
        n = len(tokens)
        output = [False] * (n - 1) + [True]
        target.decode(tokens, range(position, position + n), [0] * n, output)
        features.append(target.hidden_states().reshape(n, -1))
        position += n
        tokens = [int(target.logits(n - 1).argmax())]
        answer += tokens
    return answer, np.concatenate(features)
