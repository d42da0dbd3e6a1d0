"""A model stays usable after any interruption of an answer, and the process ends as it should."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from adversarial import ScriptedDrafter
from dflash_local import ClosedError, InputError, Model, Result, load
from dflash_local.draft.draft import Draft
from dflash_local.engine.engine import Engine
from pair_engine import open_target
from shapes import of_both_shapes

N = 16
ENDLESS: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def prompt() -> str:
    return tiny_coder.prompts()["code"][0]


def short_load(**options: Any) -> Model:
    """A model of a test's own, to close it."""
    settings = {"n_ctx": 512, "kv_type": "q8_0", "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    return load(*tiny_coder.pair(), **settings | options)


def cold(model: Model, prompt: str, **options: Any) -> Result:
    model.forget()
    return model.generate(prompt, **options)


@pytest.mark.slow
@of_both_shapes("width", [0, 16], [16])
def test_an_abandoned_generator_leaves_the_model_usable(
    either_model: Model, prompt: str, width: int
) -> None:
    model = either_model
    expected = cold(model, prompt, max_tokens=N).tokens
    for n_chunks in (0, 1, 5):
        model.forget()
        chunks = model.stream(prompt, draft_width=width, **ENDLESS)
        for _ in range(n_chunks):
            next(chunks)
        del chunks
        assert model.generate(prompt, max_tokens=N).tokens == expected
    closed = model.stream(prompt, **ENDLESS)
    next(closed)
    closed.close()  # type: ignore[attr-defined]
    assert list(closed) == []
    assert model.generate(prompt, max_tokens=N).tokens == expected


def test_two_streams_of_one_thread(model: Model, prompt: str) -> None:
    """The second waits until the first has ended, and neither needs the other to be read."""
    expected = cold(model, prompt, max_tokens=N).text
    first = model.stream(prompt, max_tokens=N)
    begun = next(first).text
    second = "".join(chunk.text for chunk in model.stream(prompt, max_tokens=N))
    assert second == expected
    assert begun + "".join(chunk.text for chunk in first) == expected


def test_an_event_loop_that_ends_first(model: Model, prompt: str) -> None:
    """The answer has nobody to go to any more: it ends, and the next one is not kept waiting."""

    async def begin() -> None:
        await anext(model.astream(prompt, **ENDLESS))

    expected = cold(model, prompt, max_tokens=N).tokens
    asyncio.run(begin())
    assert model.generate(prompt, max_tokens=N).tokens == expected


# Closing


def test_use_after_close(prompt: str) -> None:
    model = short_load()
    expected = model.generate(prompt, max_tokens=4).text
    assert expected
    waiting = model.stream(prompt, max_tokens=4)
    model.close()
    model.close()
    chat = [{"role": "user", "content": "hi"}]
    uses: list[Callable[[], object]] = [
        lambda: list(waiting),
        lambda: model.generate(prompt),
        lambda: model.generate([1, 2, 3]),
        lambda: model.tokenize(prompt),
        lambda: model.detokenize([5]),
        lambda: model.chat(chat),
        lambda: asyncio.run(model.agenerate([1, 2, 3])),
        model.exactness,
        model.forget,
        lambda: model.target.hidden_states(),
        lambda: model.target.decode([1], [0], [0], [True]),
        lambda: model.target.vocabulary.ends_text(1),
        lambda: model.drafter and model.drafter.length(0),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="load it again"):
            use()


def test_a_model_that_nobody_holds_is_freed(prompt: str) -> None:
    """With its thread: rebinding a name in a notebook must not keep two models in memory."""
    before = set(threading.enumerate())
    model = short_load()
    model.generate(prompt, max_tokens=4)
    with pytest.raises(InputError):  # an error that leaves no trace of the model either
        model.generate("x", logit_bias=dict.fromkeys(range(model.target.n_vocab), -float("inf")))
    chunks = model.stream(prompt, max_tokens=N)
    next(chunks)
    target, thread = weakref.ref(model.target), model._worker._thread
    del model, chunks
    gc.collect()
    thread.join(60)
    assert target() is None
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


# Processes

BEGIN = """
import asyncio, os, signal, sys, threading
import dflash_local
import tiny_coder
target_path, drafter_path = tiny_coder.pair()
prompt = tiny_coder.prompts()["code"][0]
options = {"n_ctx": 8192, "kv_type": "q8_0", "n_threads": 1, "quiet": True}
model = dflash_local.load(target_path, drafter_path, **options)
endless = {"max_tokens": None, "ignore_eos": True}
"""

EXITS = {
    "with a generator at work": "chunks = model.stream(prompt, **endless); next(chunks)",
    "in its loop": "for chunk in model.stream(prompt, **endless): sys.exit()",
    "while another thread waits for tokens": """
begun = threading.Event()
def wait():
    for _ in model.stream(prompt, **endless):
        begun.set()
threading.Thread(target=wait, daemon=True).start()
begun.wait()
""",
    "while another thread reads texts": """
def read():
    try:
        while True:
            model.detokenize(model.tokenize(prompt * 20))
    except dflash_local.ClosedError:
        pass
threading.Thread(target=read, daemon=True).start()
chunks = model.stream(prompt, **endless); next(chunks)
""",
    "in an asynchronous loop": """
async def main():
    async for _ in model.astream(prompt, **endless):
        return
asyncio.run(main())
""",
    "with the model dropped, its stream kept": """
chunks = model.stream(prompt, **endless); next(chunks); del model
""",
    "in a fork that asks the model, too": """
model.generate(prompt, max_tokens=4)
if os.fork() == 0:
    try:
        model.generate(prompt, max_tokens=4)
    except dflash_local.ClosedError as error:
        model.close()
        sys.exit("a fork" not in str(error))
assert os.wait()[1] == 0
model.generate(prompt, max_tokens=4)
""",
    "with the drafter never closed": "model.generate(prompt, max_tokens=4); model.target.close()",
}

HANDLES = """
import gc, sys
import tiny_coder
from dflash_local.draft.drafter import DraftRequest
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from dflash_local.target_model.options import TargetOptions
import numpy as np
def handles():
    options = TargetOptions(n_ctx=256, n_threads=1, tapped_layers=(2, 4, 6))
    target = Target(tiny_coder.pair()[0], options)
    drafter = open_drafter(tiny_coder.pair()[1], target, n_seq=1, n_ctx=256)
    target.decode([5, 6], [0, 1], [0, 0], [False, True])
    drafter.inject(0, target.hidden_states().reshape(2, -1))
    return target, drafter
def draft(drafter):
    return drafter.draft([DraftRequest(0, 7, np.zeros((0, drafter.n_features), np.float32), 15)])

target, drafter = handles()
target.close()
try:
    draft(drafter)
except Exception as error:
    assert "closed" in str(error), error
drafter.close(); target.close()

target, drafter = handles()
drafter.close(); target.close()

target, drafter = handles()
del target
gc.collect()
assert len(draft(drafter)[0]) == 15  # it keeps what it works on
del drafter

target, drafter = handles()
states = target.hidden_states()
logits = target.logits(1).copy()
del drafter
target.decode([7], [2], [0], [True])
del target
assert np.isfinite(states).all() and np.isfinite(logits).all()

first, second = handles(), handles()
del first
gc.collect()
assert len(draft(second[1])[0]) == 15
never_closed = handles()
cycle = [never_closed]; cycle.append(cycle)
"""

CTRL_C = """
try:
    for _ in model.stream(prompt, **endless):
        print("begun", flush=True)
    print("not interrupted")
except KeyboardInterrupt:
    plain = model.generate(prompt, max_tokens=16, draft_width=0)
    model.forget()
    assert model.generate(prompt, max_tokens=16).tokens == plain.tokens
    print("usable")
"""


def python(code: str) -> subprocess.Popen[str]:
    support = str(ROOT / "tests" / "support")
    path = os.pathsep.join(filter(None, [str(ROOT), support, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


class Sticks(ScriptedDrafter):
    def close(self) -> None:
        raise RuntimeError("stuck")


def test_close_frees_what_it_can() -> None:
    with open_target() as target:
        model = Model(Engine(target, Sticks(lambda *_: Draft.chain([]))))
        with pytest.raises(RuntimeError, match="stuck"):
            model.close()
        assert not target.is_open


AT_EXIT = """
import atexit
atexit.register(lambda: print([model.target.is_open for model in models]))
from dflash_local import load
from tiny_coder import pair

def stuck():
    raise RuntimeError("stuck")

models = [
    load(pair()[0], n_ctx=64, n_gpu_layers=0, n_threads=1, draft_width=0, quiet=True)
    for _ in range(2)
]
for model in models:
    model.engine.prefix_cache.close = stuck
"""


@pytest.mark.slow
def test_at_exit_one_model_that_fails_to_close_keeps_no_other_open() -> None:
    _, output, errors = ended(python(AT_EXIT))
    assert output == "[False, False]\n", errors
    assert "stuck" in errors


SILENT = """
import sys
from dflash_local import load
from tiny_coder import pair
sys.stderr.close()
model = load(*pair(), n_ctx=128, n_gpu_layers=0, n_threads=1)
assert model._say("a line") is None
print(len(model.generate([5, 6, 7], max_tokens=4, ignore_eos=True).tokens))
"""


@pytest.mark.slow
def test_a_closed_stderr_ends_nothing() -> None:
    assert ended(python(SILENT))[:2] == (0, "4\n")


class Refuses(threading.Event):
    """An event of a caller's that cannot be asked."""

    def is_set(self) -> bool:
        raise RuntimeError("not today")


def test_a_cancel_that_raises_ends_its_own_request(model: Model, prompt: str) -> None:
    expected = cold(model, prompt, max_tokens=N).tokens
    with pytest.raises(RuntimeError, match="not today"):
        model.generate(prompt, max_tokens=N, cancel=Refuses())
    assert model.generate(prompt, max_tokens=N).tokens == expected


@pytest.mark.one_in(14)
@pytest.mark.parametrize("way", EXITS)
def test_python_exits_in_the_middle_of_an_answer(way: str) -> None:
    code, output, errors = ended(python(BEGIN + EXITS[way]))
    # A slow machine says what it waits for while the model is loaded.
    told = [line for line in errors.splitlines() if not line.startswith("trying ")]
    assert (code, output, told) == (0, "", [])


def test_handles_close_in_any_order() -> None:
    assert ended(python(HANDLES)) == (0, "", "")


def test_ctrl_c_leaves_the_model_usable() -> None:
    process = python(BEGIN + CTRL_C)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    code, output, errors = ended(process)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == "usable"


@pytest.mark.slow
def test_ctrl_c_that_nobody_handles_ends_the_process() -> None:
    process = python(BEGIN + CTRL_C.replace("KeyboardInterrupt", "ValueError"))
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    code, output, errors = ended(process)
    assert code == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "not interrupted" not in output
