"""Pictures in prompts: the answers are those that libmtmd's own evaluation gives, with drafts and
without, and a picture is computed once."""

import ctypes
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

import tiny_coder
from dflash_local import Model, Result, load
from dflash_local.chat.pictures import MOST_IMAGES
from dflash_local.errors import FileError, InputError
from dflash_local.fit.options import HEADS
from dflash_local.prefixes.reuse import common_prefix
from dflash_local.result import PromptProgress
from dflash_local.target_model.images import Prompt
from hybrid import TAPS, write_hybrid
from small_model import write_small
from synthetic import write_drafter
from vision_models import KINDS, asked, picture, write_projector, write_vision_target

# isort: split
import llama_cpp.llama_cpp as api

pytestmark = pytest.mark.one_in(4)
N = 16
ASKED = "def add(a, b):"


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target that sees, its drafter, and its projector."""
    folder = tmp_path_factory.mktemp("vision")
    kind: str = request.param
    target = write_vision_target(folder / f"{kind}.gguf", kind)
    draft = tiny_coder.pair()[1]
    if kind == "qwen35":
        draft = write_drafter(folder / "dflash-drafter.gguf", target, target_layers=TAPS)
    return [target, draft, write_projector(folder / f"mmproj-{kind}.gguf", target)]


def loaded(files: Sequence[Path | str], **options: Any) -> Model:
    target, draft, projector = files
    given = {"n_ctx": 2048, "n_threads": 1, "kv_type": "q8_0", "draft_shape": "chain", **options}
    model = load(target, draft, mmproj=projector, n_gpu_layers=0, quiet=True, **given)
    model.draft_width = model.engine.max_width
    return model


@pytest.fixture(scope="module")
def model(files: list[Path]) -> Iterator[Model]:
    with loaded(files) as opened:
        yield opened


def answer(model: Model, messages: list[dict[str, Any]], **options: Any) -> Result:
    return model.chat(messages, max_tokens=N, **{"temperature": 0.0, **options})


def by_libmtmd(files: list[Path], model: Model, prompt: Prompt, data: bytes) -> list[int]:
    """The likeliest tokens after a prompt with one picture, by libmtmd's own evaluation."""
    from llama_cpp import mtmd_cpp as mtmd

    before = prompt[: next(iter(prompt.images))]
    after = [t for t in prompt[len(before) :] if t >= 0]
    params = api.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.addressof(no_devices)
    loaded = api.llama_model_load_from_file(str(files[0]).encode(), params)
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 8  # q8_0
    settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = api.llama_init_from_model(loaded, settings)
    of_mtmd = mtmd.mtmd_context_params_default()
    of_mtmd.use_gpu = of_mtmd.warmup = of_mtmd.print_timings = False
    of_mtmd.n_threads = 1
    eyes = mtmd.mtmd_init_from_file(str(files[2]).encode(), loaded, of_mtmd)
    opened = mtmd.mtmd_helper_bitmap_init_from_buf(
        eyes, (ctypes.c_uint8 * len(data)).from_buffer_copy(data), len(data), False
    )
    chunks = mtmd.mtmd_input_chunks_init()
    text = mtmd.mtmd_input_text(b"<__media__>", 11, False, True)
    pictures = (ctypes.c_void_p * 1)(opened)
    assert mtmd.mtmd_tokenize(eyes, chunks, ctypes.byref(text), pictures, 1) == 0
    at = ctypes.c_int32(0)

    def decode(tokens: list[int]) -> None:
        # M-RoPE goes on behind the longer side of an image, which llama.cpp would not know.
        row = (api.llama_token * len(tokens))(*tokens)
        batch = api.llama_batch_get_one(row, len(tokens))
        places = (api.llama_pos * len(tokens))(*range(at.value, at.value + len(tokens)))
        batch.pos = ctypes.cast(places, ctypes.POINTER(api.llama_pos))
        assert api.llama_decode(context, batch) == 0
        at.value += len(tokens)

    # What the target wants around a picture is in the prompt, and among libmtmd's chunks.
    image = [
        chunk
        for i in range(mtmd.mtmd_input_chunks_size(chunks))
        if mtmd.mtmd_input_chunk_get_type(chunk := mtmd.mtmd_input_chunks_get(chunks, i))
    ]
    assert len(image) == len(prompt.images) == 1
    decode(before)
    end = ctypes.c_int32()
    assert (
        mtmd.mtmd_helper_eval_chunk_single(
            eyes, context, image[0], at.value, 0, 512, False, ctypes.byref(end)
        )
        == 0
    )
    assert end.value - at.value == sum(token < 0 for token in prompt)
    at.value = end.value
    found: list[int] = []
    decode(after)
    for _ in range(N):
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), (model.n_vocab,))
        found.append(int(logits.argmax()))
        if api.llama_vocab_is_eog(api.llama_model_get_vocab(loaded), found[-1]):
            break
        decode(found[-1:])
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_bitmap_free(opened)
    mtmd.mtmd_free(eyes)
    api.llama_free(context)
    api.llama_model_free(loaded)
    return found


@pytest.mark.one_in(2)
def test_answers_are_those_of_libmtmds_own_evaluation(files: list[Path], model: Model) -> None:
    data = picture(64, 48)
    prompt = model.chat_prompt([asked(ASKED, data)])
    assert isinstance(prompt, Prompt)
    expected = by_libmtmd(files, model, prompt, data)
    plain = model.generate(prompt, max_tokens=N, temperature=0, draft_width=0)
    assert plain.tokens == expected
    model.forget()
    assert model.generate(prompt, max_tokens=N, temperature=0).tokens == expected


def test_an_answer_depends_on_the_picture(model: Model) -> None:
    one, other, again = (
        answer(model, [asked(ASKED, picture(seed=seed))], logprobs=5).logprobs[0]
        for seed in (1, 2, 1)
    )
    assert one != other
    assert one.token == again.token


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("files", "sampling"),
    [
        pytest.param(kind, sampling, marks=[] if (i, n) in ((0, 0), (2, 1)) else [pytest.mark.slow])
        for i, kind in enumerate(KINDS)
        for n, sampling in enumerate([{}, {"temperature": 0.9, "seed": 7}])
    ],
    indirect=["files"],
    scope="module",
)
def test_drafts_change_no_answer_in_two_turns(model: Model, sampling: dict[str, Any]) -> None:
    texts, drafted = [], 0
    for width in (0, model.engine.max_width):
        model.forget()
        messages = [asked(ASKED, picture(seed=3), picture(80, 32, seed=4))]
        turns = []
        for question in ("def sub(a, b):", None):
            result = answer(model, messages, draft_width=width, **sampling)
            turns.append(result.tokens)
            drafted += result.stats.drafted
            messages.append({"role": "assistant", "content": result.content})
            if question:
                messages.append(asked(question, picture(48, 48, seed=5)))
        texts.append(turns)
    assert texts[0] == texts[1]
    assert drafted > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["small model", "heads"])
def test_drafters_that_read_tokens_go_on_after_a_picture(kind: str, tmp_path: Path) -> None:
    if kind == "heads":
        target = write_hybrid(tmp_path / "seeing.gguf", "qwen35", tiny_coder.pair()[0], head=0.1)
        draft: Path | str = HEADS
    else:
        target = write_vision_target(tmp_path / "seeing.gguf", "qwen3vl")
        draft = write_small(tmp_path / "small.gguf")
    files = [target, draft, write_projector(tmp_path / "mmproj.gguf", target)]
    with loaded(files) as model:
        messages = [asked(ASKED, picture(seed=3))]
        plain = answer(model, messages, draft_width=0)
        model.forget()
        drafted = answer(model, messages, draft_width=4)
    assert drafted.stats.warning is None
    assert drafted.stats.drafted > 0
    assert drafted.tokens == plain.tokens


def test_a_second_question_about_a_picture_decodes_only_the_question(model: Model) -> None:
    model.forget()
    side = 256 if model.target.path.stem == "gemma4" else 384  # must fit a batch
    n_image = 16 if model.target.path.stem == "gemma3" else side * side // 256
    messages = [asked(ASKED, picture(side, side))]
    prompt = model.chat_prompt(messages)
    first = answer(model, messages)
    assert first.stats.prompt_tokens > n_image
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And now?"},
    ]
    held = [*prompt, *first.tokens[:-1]]  # the last one was never decoded
    ids = model.chat_prompt(messages)
    n_common = common_prefix(held, ids)
    second = answer(model, messages)
    n_decoded = second.stats.prompt_tokens - second.stats.cached_tokens
    if model.target.is_recurrent:  # from a checkpoint on
        assert len(ids) - n_common <= n_decoded < N + 64
    else:
        assert n_decoded == len(ids) - n_common


@pytest.mark.slow
def test_four_slots_answer_as_one_does(files: list[Path], model: Model) -> None:
    asked_for = 2 * [[asked(ASKED, picture(96, 64, seed=i))] for i in range(3)]
    expected = []
    for messages in asked_for[:3]:
        model.forget()
        expected.append(answer(model, messages).tokens)
    with loaded(files, n_seq=4) as four, ThreadPoolExecutor(len(asked_for)) as pool:
        found = list(pool.map(lambda messages: answer(four, messages).tokens, asked_for))
    assert found == 2 * expected


def test_a_picture_that_left_its_slot_is_not_computed_again(files: list[Path]) -> None:
    with loaded(files, cache_mb=64) as model:
        messages = [asked(ASKED, picture(256, 192))]
        first = answer(model, messages)
        other = answer(model, [{"role": "user", "content": "x " * 300}])
        again = answer(model, messages)
        assert not other.stats.cached_tokens
        assert again.tokens == first.tokens
        assert again.stats.prompt_tokens - again.stats.cached_tokens <= 64


def test_exact_answers_after_a_picture_are_those_of_a_cold_cache(files: list[Path]) -> None:
    n_batch = 128 if files[0].stem == "gemma4" else 64  # an image of 81 tokens, at once
    with loaded(files, exact=True, n_batch=n_batch, n_ctx=1024) as model:

        def ask(end: str) -> Result:
            text = "def add(a, b): return a + b\n" * 20 + end
            return answer(
                model, [asked(text, picture(128, 128, seed=1))], draft_width=0, logprobs=3
            )

        ask("first of all")
        warm = ask("and another")
        model.forget()
        cold = ask("and another")
    assert warm.stats.cached_tokens
    assert warm.logprobs == cold.logprobs


def test_a_picture_fills_the_context_by_its_cells(files: list[Path]) -> None:
    with loaded(files, n_ctx=300, n_batch=256) as model:
        assert answer(model, [asked("a", picture(128, 128))]).tokens
        if model.target.path.stem.startswith("gemma"):
            return  # those of gemma3 have 16 rows, those of gemma4 must fit a batch
        with pytest.raises(InputError, match="the context holds 300"):
            answer(model, [asked("a", picture(320, 256))])
        n_free = model.n_ctx - model.status().cells_used
        assert 0 <= n_free < 300 - 64


def test_more_pictures_than_a_request_may_have_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match=f"more than {MOST_IMAGES} images"):
        model.chat_prompt([asked("a", *[picture(16, 16)] * (MOST_IMAGES + 1))])


def test_others_answer_while_a_picture_is_computed(files: list[Path]) -> None:
    shown = [asked(ASKED, picture(seed=1))]
    with loaded(files, n_seq=2) as two, ThreadPoolExecutor(1) as pool:
        expected = answer(two, shown).tokens
        two.forget()
        go_on = Event()
        assert two.projector is not None
        two.projector._eyes.submit(go_on.wait)  # its thread is busy
        seeing = pool.submit(answer, two, shown)
        while not two.status().n_busy:
            time.sleep(0.01)
        assert answer(two, [{"role": "user", "content": ASKED}]).tokens
        assert not seeing.done()
        go_on.set()
        assert seeing.result().tokens == expected


def test_a_request_that_waits_for_a_picture_can_be_given_up(files: list[Path]) -> None:
    with loaded(files) as model, ThreadPoolExecutor(1) as pool:
        go_on = Event()
        assert model.projector is not None
        model.projector._eyes.submit(go_on.wait)
        given_up, shown = Event(), [asked(ASKED, picture(seed=1))]
        seeing = pool.submit(answer, model, shown, cancel=given_up)
        while not model.status().n_busy:
            time.sleep(0.01)
        given_up.set()
        seeing.result()
        go_on.set()
        assert answer(model, shown).tokens


def test_counts_are_of_cells(model: Model) -> None:
    model.forget()
    told: list[PromptProgress] = []
    for chunk in model.stream_chat(
        [asked(ASKED, picture(256, 256))], max_tokens=N, temperature=0, prompt_progress=True
    ):
        told += [chunk.prompt] if chunk.prompt else []
        result = chunk.result
    assert result is not None
    n = result.stats.prompt_tokens
    assert {each.n for each in told} == {n}
    assert told[-1].n_read == n
    (slot,) = model.status().slots
    assert slot.n_cached_tokens == n + len(result.tokens) - 1
    assert model.status().cells_used == slot.n_cached_tokens


def test_a_slot_with_a_picture_weighs_its_cells(files: list[Path]) -> None:
    with loaded(files, n_seq=2, cache_mb=0) as two:
        if two.target.path.stem == "gemma3":
            return  # its pictures have few rows
        shown = [asked(ASKED, picture(256, 256))]
        for messages in (shown, *([{"role": "user", "content": x}] for x in ("x = 1\n" * 20, "y"))):
            two.chat(messages, max_tokens=1)
        assert answer(two, shown).stats.cached_tokens > 256


def test_a_prompt_takes_over_the_picture_of_one_in_progress(files: list[Path]) -> None:
    shown = [asked(ASKED, picture(256, 256))]
    with loaded(files, n_seq=2) as two, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: answer(two, shown), range(2)))
    assert found[0].tokens == found[1].tokens
    first, second = sorted((result.stats for result in found), key=lambda s: s.cached_tokens)
    assert second.prompt_tokens == first.prompt_tokens
    assert second.prompt_tokens - second.cached_tokens <= 64


def test_odd_pictures_are_answered_or_refused(model: Model) -> None:
    for size in ((1, 1), (1, 90), (90, 1), (7, 333), (2000, 30)):
        assert answer(model, [asked("a", picture(*size))]).tokens


def test_a_text_cannot_pretend_to_be_a_picture(model: Model) -> None:
    text = "<__media__> <image> \ufdd0"
    plain = model.chat_prompt([{"role": "user", "content": text}])
    assert not isinstance(plain, Prompt)
    prompt = model.chat_prompt([asked(text, picture())])
    assert isinstance(prompt, Prompt) and len(prompt.images) == 1


def test_ids_of_pictures_are_no_tokens(model: Model) -> None:
    prompt = model.chat_prompt([asked("a", picture())])
    with pytest.raises(InputError, match="of the prompt is not in 0 to"):
        model.generate(list(prompt))


def test_a_model_without_a_projector_says_what_to_do(files: list[Path]) -> None:
    with (
        load(files[0], "none", mmproj="none", n_ctx=256, n_gpu_layers=0, quiet=True) as blind,
        pytest.raises(InputError, match="load a vision model with --mmproj FILE"),
    ):
        blind.chat([asked("a", picture())])


def test_a_projector_is_found_beside_the_only_target(files: list[Path]) -> None:
    lines: list[str] = []
    with load(files[0], "none", n_ctx=256, n_gpu_layers=0, say=lines.append) as model:
        assert model.projector is not None
    assert f"images: {files[2].name}" in lines


def test_other_files_are_no_projectors(files: list[Path]) -> None:
    with pytest.raises(FileError, match="no projector, but a model of kind"):
        load(files[0], "none", mmproj=files[0], n_gpu_layers=0, quiet=True)
