"""Many callers at once: each gets its own answer, and whatever they do, the slots are free after.

Batches of several sequences round otherwise than single steps, so answers with others around them
are compared with plain ones by the gap rule; alone they are equal.
"""

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mini_pair
import tiny_coder
from adapters import write_lora
from dflash_local import DflashError, InputError, Model, Result, load
from dflash_local.draft.shape import DraftShape
from dflash_local.engine import plain_steps
from dflash_local.errors import ClosedError, QueueFullError, QueueTimeoutError
from dflash_local.prefixes.reuse import LEAST_GAIN
from dflash_local.worker.job import Generation
from gap_rule import equal_by_gap_rule, joint_noise
from plain_answer import PlainAnswer
from shapes import NOISE, SHAPES, exact_model

N = 16
N_SEQ = 3
ON_CPU: dict[str, Any] = {"kv_type": "q8_0", "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
ENDLESS: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}


class Bench:
    """A model of three slots, and plain answers of it to some prompts."""

    def __init__(self, model: Model, shape: DraftShape) -> None:
        """Drafts have a shape."""
        self.model, self.shape = model, shape
        known = tiny_coder.prompts()
        self.plain: list[PlainAnswer] = []
        for text in [*known["code"][:3], *known["chat"][:2]]:
            model._worker.run(
                lambda text=text: self.plain.append(PlainAnswer(model.target, text, N))
            )
        self.noise = NOISE if shape == "tree" else self._joint_noise()
        model.forget()

    def _joint_noise(self) -> float:
        three = self.plain[1:4]
        prompts, tokens = [p.prompt for p in three], [p.tokens for p in three]
        target, noises = self.model.target, list[float]()
        self.model._worker.run(
            lambda: noises.append(joint_noise(target, prompts, tokens, [16, 5, 1]))
        )
        return noises[0]

    def alone(self, prompt: list[int], **options: Any) -> Result:
        self.model.forget()
        return self.model.generate(prompt, **{"max_tokens": N, **options})

    def check(self, which: int, tokens: list[int]) -> None:
        """Equal to the plain answer, as far as it went."""
        self.plain[which].equals(tokens, self.noise)


@contextlib.contextmanager
def opened(shape: DraftShape) -> Iterator[Bench]:
    with exact_model(shape, n_ctx=1024, n_seq=N_SEQ) as model:
        model.draft_width = 8
        yield Bench(model, shape)


@pytest.fixture(scope="module")
def of_chains() -> Iterator[Bench]:
    with opened("chain") as bench:
        yield bench


@pytest.fixture(scope="module")
def of_trees() -> Iterator[Bench]:
    """What rounds tell, and their tokens, come while the next ones draft, as on a GPU."""
    with opened("tree") as bench:
        meter, tell = bench.model.engine.meter, bench.model.engine.meter.tell
        n_late = 0

        def noticed() -> None:
            nonlocal n_late
            n_late += meter.has_untold
            tell()

        meter.overlaps, meter.tell = True, noticed  # type: ignore[method-assign]
        yield bench
        assert n_late > 20


of_both_shapes = pytest.mark.parametrize("bench", SHAPES, indirect=True)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Of chains, where nothing is said."""
    shared: Bench = request.getfixturevalue(f"of_{getattr(request, 'param', 'chain')}s")
    yield shared
    at_rest(shared.model)
    assert shared.alone(shared.plain[0].prompt).tokens == shared.plain[0].tokens


def at_rest(model: Model) -> None:
    """All slots free, target and drafter in step."""
    model._worker.run(lambda: None)  # which waits for those at work
    status = model.status()
    assert (status.n_busy, status.n_waiting) == (0, 0)
    assert not any(slot.busy for slot in status.slots)
    drafter = model.drafter
    assert drafter is not None
    for slot in model.engine.slots:
        assert not slot.pending
        assert drafter.length(slot.seq) <= len(slot.cached)


def at_once(work: list[Callable[[], Any]]) -> list[Any]:
    """The results of all, each called on a thread of its own."""
    with ThreadPoolExecutor(len(work)) as threads:
        return [each.result(120) for each in [threads.submit(call) for call in work]]


def occupy(model: Model, n: int = N_SEQ) -> list[Iterator[Any]]:
    """Streams that fill so many slots until they are closed."""
    streams = [model.stream([5 + i], **ENDLESS) for i in range(n)]
    for stream in streams:
        next(stream)
    return streams


def close(streams: list[Iterator[Any]]) -> None:
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]


# Answers


@pytest.mark.one_in(2)
@of_both_shapes
def test_what_prompts_have_in_common_is_decoded_once(bench: Bench) -> None:
    model = bench.model
    prompt = [token for plain in bench.plain for token in plain.prompt]
    prompts = [prompt, prompt, [*prompt[:-1], prompt[0]]]
    model.forget()
    found = at_once([lambda p=p: model.generate(p, max_tokens=N) for p in prompts])
    n_decoded = [result.stats.prompt_tokens - result.stats.cached_tokens for result in found]
    assert max(n_decoded) == len(prompt)
    assert sum(n_decoded) <= len(prompt) + 2 * LEAST_GAIN
    assert all(result.stats.accepted for result in found)
    cold = bench.alone(prompt, logprobs=2)
    for result in found[:2]:
        equal_by_gap_rule(cold.tokens, cold.logprobs, result.tokens, bench.noise)
    at_rest(model)


@pytest.mark.one_in(2)
@of_both_shapes
def test_a_sampled_answer_is_that_of_its_seed(bench: Bench) -> None:
    prompt = bench.plain[0].prompt
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5}
    expected = bench.alone(prompt, draft_width=0, **sampled)
    for width in (3, 16):
        assert bench.alone(prompt, draft_width=width, **sampled).tokens == expected.tokens
    # With others around it, its draws are still its own: what differs, differs by rounding.
    streams = occupy(bench.model, 1)
    bench.model.generate(prompt, max_tokens=N, **sampled)
    close(streams)
    assert bench.alone(prompt, **sampled).tokens == expected.tokens


@pytest.mark.slow
@of_both_shapes
def test_sequences_that_outgrow_the_cells_lose_nothing(bench: Bench) -> None:
    """Three that would each fill the whole context: those that began last step aside in turn."""
    n_ctx = 160
    with exact_model(bench.shape, n_ctx=n_ctx, n_seq=N_SEQ) as model:
        prompts = [plain.prompt for plain in bench.plain[:3]]
        results = at_once(
            [lambda p=p: model.generate(p, draft_width=8, **ENDLESS) for p in prompts]
        )
        at_rest(model)
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.finish_reason == "length"
        assert len(prompt) + len(result.tokens) == n_ctx + 1
        if len(bench.plain[i].tokens) == N:
            bench.check(i, result.tokens[:N])


def test_unlike_adapters_take_no_cells_from_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that cannot share a pass: one pass may use up the cells. Whether it does depends on
    the length of the prompts."""
    monkeypatch.setattr(plain_steps, "_AHEAD_S", 60.0)  # always as many steps ahead as there may be
    target, n = mini_pair.pair()[0], 300
    lora = write_lora(tmp_path / "lora.gguf", target, gain=0.15)
    with load(target, "none", lora=[lora], n_ctx=560, n_seq=2, **ON_CPU) as model:

        def ask(n_prompt: int, scale: float) -> Result:
            prompt = [5] * n_prompt
            return model.generate(
                prompt, lora={0: scale}, max_tokens=n, ignore_eos=True, draft_width=0
            )

        for n_more in (0, 16):
            found = at_once([lambda: ask(9, 1.0), lambda more=n_more: ask(9 + more, 0.5)])
            assert [len(result.tokens) for result in found] == [n, n]


# Leaving, at any moment


def test_cancelled_while_it_waits(bench: Bench) -> None:
    streams = occupy(bench.model)
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(bench.model.generate, [9], cancel=cancel)
        cancel.set()
        result = waiting.result(60)
    assert (result.finish_reason, result.tokens, result.text) == ("cancelled", [], "")
    assert next(streams[0]).finish_reason is None
    close(streams)


def test_cancelled_while_it_is_suspended() -> None:
    """In a context that is too small for two: its result says as much as that of any other."""
    endless: dict[str, Any] = {**ENDLESS, "temperature": 0.0}
    with load(*mini_pair.pair(), n_ctx=544, n_seq=2, **ON_CPU) as model:
        first, cancel = model.stream("def a", **endless), threading.Event()
        next(first)
        with ThreadPoolExecutor(1) as thread:
            second = thread.submit(model.generate, "def b", cancel=cancel, **endless)
            while model.status().n_busy < 2 or model.status().n_waiting:
                next(first)
            while not model.status().n_waiting:
                assert next(first).result is None
            cancel.set()
            result = second.result(60)
        assert result.finish_reason == "cancelled" and len(result.tokens) > 16
        assert result.stats.drafting is not None
        first.close()


def test_cancelled_in_its_prompt(bench: Bench) -> None:
    long = (bench.plain[0].prompt * 30)[:600]
    streams = occupy(bench.model, 1)
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(bench.model.generate, long, cancel=cancel, max_tokens=64)
        while bench.model.status().n_busy < 2:
            next(streams[0])
        cancel.set()
        result = waiting.result(60)
    assert result.finish_reason == "cancelled"
    close(streams)


@pytest.mark.one_in(2)
@of_both_shapes
def test_cancelled_by_lot_again_and_again(bench: Bench) -> None:
    model = bench.model

    def ask(seed: int) -> None:
        lot = random.Random(seed)
        prompt = bench.plain[lot.randrange(5)].prompt * lot.choice([1, 1, 4])
        options = {
            "max_tokens": lot.randint(1, 8),
            "draft_width": lot.choice([0, 3, 16, "auto"]),
            "temperature": lot.choice([0, 0.8]),
        }
        way = lot.randrange(4)
        if way == 0:
            stream = model.stream(prompt, **options)
            for _ in range(lot.randint(1, 2)):
                next(stream, None)
            close([stream])
        elif way == 1:
            cancel = threading.Event()
            timer = threading.Timer(lot.random() / 20, cancel.set)
            timer.start()
            model.generate(prompt, cancel=cancel, **options)
            timer.join()
        elif way == 2:
            with contextlib.suppress(QueueTimeoutError):
                model.generate(prompt, queue_timeout=lot.random() / 50, **options)
        else:
            assert model.generate(prompt, **options).finish_reason in ("length", "stop")

    before = model.status().requests
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(60)))
    at_rest(model)
    assert 0 < model.status().requests - before <= 60


@pytest.mark.one_in(2)
@of_both_shapes
def test_an_error_of_one_request_leaves_the_others_alone(bench: Bench) -> None:
    streams = occupy(bench.model, 2)
    nothing = dict.fromkeys(range(bench.model.target.n_vocab), -float("inf"))
    for width in (0, 8):
        with pytest.raises(InputError, match="leave no token"):
            bench.model.generate(bench.plain[0].prompt, logit_bias=nothing, draft_width=width)
    for stream in streams:
        assert next(stream).finish_reason is None
    close(streams)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_reader_that_fails_is_gone(bench: Bench, error: type[Exception]) -> None:
    model = bench.model
    streams = occupy(model, 1)

    def fail(_item: object) -> None:
        raise error("nobody is here")

    answer = model._worker.submit(model._text_request(bench.plain[0].prompt, ENDLESS), fail)
    answer.wait()
    assert answer.given_up and answer.error is None
    assert next(streams[0]).finish_reason is None
    close(streams)


# The queue


def test_a_full_queue_refuses_at_once(bench: Bench) -> None:
    model = bench.model
    streams = occupy(model)
    model.max_queue = 1
    try:
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(model.generate, bench.plain[0].prompt, max_tokens=N)
            while model.status().n_waiting < 1:
                next(streams[0])
            with pytest.raises(QueueFullError, match="1 requests are waiting") as found:
                model.generate([5])
            assert found.value.retry_after >= 1
            with pytest.raises(QueueFullError):
                asyncio.run(model.asubmit([5]))
            close(streams)
            bench.check(0, waiting.result(60).tokens)
        with pytest.raises(InputError, match="max_queue is -1"):
            model.max_queue = -1
    finally:
        model.max_queue = None


def test_waiting_too_long(bench: Bench) -> None:
    streams = occupy(bench.model)
    with pytest.raises(QueueTimeoutError, match="no slot was free"):
        bench.model.generate([5], queue_timeout=0.01)
    close(streams)
    assert len(bench.model.generate([5], queue_timeout=60, max_tokens=2).tokens) == 2


def test_who_finds_a_slot_has_not_waited_too_long(bench: Bench) -> None:
    """However short its patience, and however long the step in which it came."""
    streams = occupy(bench.model, N_SEQ - 1)
    result = bench.model.generate(bench.plain[0].prompt, queue_timeout=0, max_tokens=N)
    bench.check(0, result.tokens)
    close(streams)


def test_closing_ends_all() -> None:
    model = load(*mini_pair.pair(), n_ctx=4096, n_seq=2, **ON_CPU)
    streams = occupy(model, 2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(model.generate, [9])
        while model.status().n_waiting < 1:
            next(streams[0])
        model.close()
        with pytest.raises(ClosedError):
            waiting.result(60)
    for stream in streams:
        *_, last = stream
        assert last.finish_reason == "cancelled"


# What a request may ask for


def test_a_deadline_ends_an_answer(bench: Bench) -> None:
    result = bench.model.generate(bench.plain[0].prompt, deadline_s=0, **ENDLESS)
    assert result.finish_reason == "length"
    assert 1 <= len(result.tokens) < 64


def test_a_deadline_ends_an_answer_that_is_suspended() -> None:
    """In a context that is too small for two, while the other one is still at work."""
    answers: list[Generation] = []
    at_its_end: list[bool] = []
    with load(*mini_pair.pair(), n_ctx=544, n_seq=2, **ON_CPU) as model:

        def submit(prompt: str, sink: Callable[[Any], None], **options: Any) -> None:
            wanted = model._text_request(prompt, {**ENDLESS, **options})
            answers.append(model._worker.submit(wanted, sink))

        def pass_the_deadline(_item: object) -> None:
            for answer in answers[1:]:
                if answer.sequence is not None and not answer.sequence.has_slot:
                    answer._first_token_at = -math.inf

        def ended(item: object) -> None:
            if item in answers:
                at_its_end.append(answers[0].is_over)

        submit("def a", pass_the_deadline)
        submit("def b", ended, deadline_s=600)
        model._worker.run(lambda: None)  # which waits for both
    ended_early = answers[1].running
    assert ended_early.finish_reason == "length" and len(ended_early.tokens) > 16
    assert at_its_end == [False]


def test_a_prompt_may_be_computed_without_the_cache(bench: Bench) -> None:
    prompt = bench.plain[0].prompt
    bench.alone(prompt)
    warm = bench.model.generate(prompt, max_tokens=N)
    anew = bench.model.generate(prompt, max_tokens=N, cache_prompt=False)
    assert warm.stats.cached_tokens == len(prompt) - 1 and anew.stats.cached_tokens == 0
    assert warm.tokens == anew.tokens == bench.plain[0].tokens


def test_names_of_control_tokens_and_ends_of_text(bench: Bench) -> None:
    model = bench.model
    (end,) = model.tokenize("<|im_end|>")
    (control,) = model.tokenize("<|im_start|>")
    forced = {"logit_bias": {control: 1e5}, "max_tokens": 2}
    assert model.generate([5], **forced).text == ""
    assert model.generate([5], special=True, **forced).text == "<|im_start|>" * 2
    ended = model.generate([5], special=True, logit_bias={end: 1e5})
    assert (ended.tokens, ended.text, ended.finish_reason) == ([end], "", "stop")
    goes_on = model.generate([5], ignore_eos=True, logit_bias={end: 1e5}, max_tokens=9)
    assert len(goes_on.tokens) == 9 and end not in goes_on.tokens


@pytest.mark.parametrize(
    "options", [{"queue_timeout": -1}, {"queue_timeout": "5"}, {"deadline_s": True}], ids=str
)
def test_bad_times(bench: Bench, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected seconds, 0 or more, or None"):
        bench.model.generate([5], **options)


def test_the_totals_are_sums(bench: Bench) -> None:
    model = bench.model
    before = model.status()
    results = [bench.alone(bench.plain[i].prompt) for i in range(2)]
    after = model.status()
    assert after.requests - before.requests == 2
    for name in ("prompt_tokens", "cached_tokens", "emitted", "rounds", "drafted", "accepted"):
        expected = sum(getattr(result.stats, name) for result in results)
        assert getattr(after, name) - getattr(before, name) == expected
    assert after.cells_used == sum(slot.n_cached_tokens for slot in after.slots)
    assert isinstance(after.position_accepted, tuple)
    with pytest.raises(DflashError):
        model.generate([])
    assert model.status().requests == after.requests


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_its_thread_dies_no_caller_waits_for_ever() -> None:
    """Those that submit in that moment, too."""
    options: dict[str, Any] = {"n_ctx": 128, "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    with (
        load(mini_pair.pair()[0], draft_width=0, **options) as model,
        ThreadPoolExecutor(8) as threads,
    ):
        worker = model._worker

        def ask(_: int) -> str:
            try:
                return model.generate([5, 6, 7], max_tokens=200, ignore_eos=True).finish_reason
            except ClosedError as error:
                return str(error)

        def die() -> None:
            raise RuntimeError

        asked = [threads.submit(ask, i) for i in range(4)]
        model.generate([5], max_tokens=1)
        worker._leave_queue = die  # type: ignore[method-assign]
        asked += [threads.submit(ask, i) for i in range(12)]
        found = {each.result() for each in asked}
        assert found <= {
            "length",
            "cancelled",
            "this model is closed; load it again",
            "the model was closed before this request's turn",
        }
        assert "this model is closed; load it again" in found
