"""Models whose layers lie on other machines: two workers on loopback, and a network between."""

import contextlib
import ctypes
import random
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import dflash_local
import tiny_coder
from dflash_local import Model, Result
from dflash_local.errors import BackendError, InputError, WorkerLostError
from dflash_local.llama import relay, runtime, workers
from dflash_local.llama.relay import VERSION
from gguf_files import UINT32, Tensor, changed
from hybrid import TAPS, write_hybrid
from rpc_workers import Networks, SlowNetwork, WorkerProcess, worker_processes
from synthetic import write_drafter

EXACT = {"n_ctx": 1024, "kv_type": "q8_0", "n_threads": 1, "draft_shape": "chain", "quiet": True}
"""So that texts are equal to the bit: chains, in Q8_0, on CPUs."""


def load(*rpc: str, files: Sequence[Any] = (), **options: object) -> Model:
    """The shipped pair, or other files, on workers; here without any."""
    split = {"tensor_split": [1] * len(rpc)} if rpc else {"n_gpu_layers": 0}
    settings = EXACT | split | {"draft_width": 8} | options
    return dflash_local.load(*(files or tiny_coder.pair()), rpc=rpc, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two() -> Iterator[list[WorkerProcess]]:
    """Workers without a client."""
    with worker_processes(2) as found:
        yield found


@pytest.fixture(scope="module")
def remote() -> Iterator[Model]:
    with worker_processes(2) as busy, load(*(worker.name for worker in busy)) as model:
        yield model


@pytest.fixture(scope="module")
def local() -> Iterator[Model]:
    with load() as model:
        yield model


@pytest.mark.one_in(17)
@pytest.mark.parametrize("case", range(68))
def test_texts_are_those_of_one_process(local: Model, remote: Model, case: int) -> None:
    """A request of its own for each number: greedy or seeded, with drafts or without."""
    prompts = [prompt for group in tiny_coder.prompts().values() for prompt in group]
    how = {"temperature": 0.0 if case % 2 else 0.8, "seed": case, "max_tokens": 40}
    prompt, width = prompts[case % len(prompts)], 0 if case % 5 == 0 else 8
    expected = local.generate(prompt, draft_width=0, **how)
    found = remote.generate(prompt, draft_width=width, **how)
    assert found.tokens == expected.tokens


def test_the_layers_lie_on_both_workers_and_the_head_here(remote: Model) -> None:
    assert remote.plan is not None
    assert [use.layers for use in remote.plan.gpus] == [5, 4]
    assert remote.plan.host.drafter > 0 == sum(use.drafter for use in remote.plan.gpus)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["row", "tensor"])
def test_what_splits_no_layers_falls_back_in_one_line(two: list[WorkerProcess], mode: str) -> None:
    said: list[str] = []
    with load(two[0].name, split_mode=mode, say=said.append) as model:
        assert model.generate("def add(a, b):", max_tokens=4).tokens
    assert len([line for line in said if f"split_mode is 'layer', not '{mode}': " in line]) == 1


@pytest.mark.slow
def test_what_is_fetched_of_a_pass_comes_together(two: list[WorkerProcess]) -> None:
    """Plain steps wait once for each worker. A pass with drafts also fetches the tapped layers'
    hidden states of both, and waits no more often, but for the first of a kind."""
    with Networks() as host:
        networks = [host.SlowNetwork(worker.port) for worker in two]
        with load(*(net.name() for net in networks)) as model:
            prompt = tiny_coder.prompts()["code"][0]
            for width in (0, 8):
                model.generate(prompt, max_tokens=40, temperature=0, draft_width=width)
                before = [net.counts()[0] for net in networks]
                found = model.generate(prompt, max_tokens=40, temperature=0, draft_width=width)
                n_waits = sum(net.counts()[0] for net in networks) - sum(before)
                assert n_waits / found.stats.rounds < 2.6


TREES = {"draft_shape": "tree"}
SPLIT: dict[str, dict[str, Any]] = {
    "trees": TREES,
    "trees beside halves": TREES | {"kv_type": "f16"},
    "copies": {"files": (tiny_coder.pair()[0], "copies")},
    "four at once": {"n_seq": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SPLIT.values(), ids=SPLIT)
def test_answers_are_those_of_one_process(
    local: Model, two: list[WorkerProcess], options: dict[str, Any]
) -> None:
    """Greedy and seeded ones, of prompts that repeat themselves. Chains give those of plain
    decoding; trees, whose cells lie in another order, those of the same trees here."""
    prompts = tiny_coder.prompts()["code"][:4]

    def ask(model: Model, i: int, **how: Any) -> Result:
        how |= {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 32}
        return model.generate(3 * prompts[i], **how)

    if "draft_shape" in options:
        with load(**options) as model:
            expected = [ask(model, i) for i in range(4)]
    else:
        expected = [ask(local, i, draft_width=0) for i in range(4)]
    n_seq, rpc = options.get("n_seq", 1), [worker.name for worker in two]
    with load(*rpc, **options) as model, ThreadPoolExecutor(n_seq) as threads:
        found = list(threads.map(partial(ask, model), range(4)))
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    if "draft_shape" in options:
        assert all(each.stats.leaves > each.stats.rounds for each in found)
    if "files" in options:  # no drafter: all that is drafted is copied
        assert sum(each.stats.copied_accepted for each in found) > 8


@pytest.mark.slow
def test_prompts_are_kept_in_memory_and_in_files(
    local: Model, two: list[WorkerProcess], tmp_path: Path
) -> None:
    """The state of a prompt on the workers comes back from this machine: after another prompt, and
    after another load."""
    first, second = (4 * prompts[0] for prompts in list(tiny_coder.prompts().values())[:2])
    expected = local.generate(first, max_tokens=24, temperature=0, draft_width=0)
    rpc = [worker.name for worker in two]
    with load(*rpc, cache_mb=16, cache_dir=tmp_path) as model:
        for prompt, is_cached in ((first, False), (second, False), (first, True)):
            found = model.generate(prompt, max_tokens=24, temperature=0)
            assert (found.stats.cached_tokens > found.stats.prompt_tokens // 2) == is_cached
        assert found.tokens == expected.tokens
    with load(*rpc, cache_mb=16, cache_dir=tmp_path) as model:
        found = model.generate(first, max_tokens=24, temperature=0)
        assert found.stats.cached_tokens > found.stats.prompt_tokens // 2
        assert found.tokens == expected.tokens


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture, way_back", [("qwen35", "snapshots"), ("qwen3next", "")])
def test_recurrent_targets_take_snapshots_or_draft_nothing(
    two: list[WorkerProcess], tmp_path: Path, architecture: str, way_back: str
) -> None:
    """A graph of ours on a worker, which replay needs, is never tried."""
    target = write_hybrid(tmp_path / "target.gguf", architecture, tiny_coder.pair()[0], seed=1)
    drafter = write_drafter(tmp_path / "draft.gguf", target, target_layers=TAPS)
    said: list[str] = []
    width = 8 if way_back else "auto"
    rpc, options = [worker.name for worker in two], {"draft_width": width, "say": said.append}
    results = []
    for names, files, how in (((), [target], {}), (rpc, [target, drafter], options)):
        with load(*names, files=files, **{"draft_width": 0} | how) as model:
            texts = ("a b a", "def f(")
            results.append([model.generate(p, max_tokens=24, temperature=0) for p in texts])
    expected, found = results
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    n_rejected = sum(each.stats.drafted - each.stats.accepted for each in found)
    assert (n_rejected > 20) == bool(way_back)
    told = "of each" if way_back else "drafting is off: the target has recurrent layers"
    assert len([line for line in said if told in line]) == 1


@pytest.mark.slow
def test_a_worker_with_a_cache_is_sent_large_tensors_once(tmp_path: Path) -> None:
    shipped, _ = tiny_coder.pair()
    target = changed(shipped, tmp_path / "wide.gguf", keys=WIDE, tensors=widen)
    worker = WorkerProcess("--cache")
    sent = []
    try:
        for _ in range(2):
            network = SlowNetwork(worker.port)
            with load(network.name(), files=[target], draft_width=None) as model:
                assert model.generate("def add(a, b):", max_tokens=2).tokens
            sent.append(network.counts()[1])
    finally:
        worker.kill()
    assert sent[0] > 3 * _LARGE and sent[1] < _LARGE / 4


_N_FF = 24 << 10
_LARGE = _N_FF * 512 // 32 * 34  # bytes in Q8_0; ggml keeps tensors of more than 10 MiB
WIDE = {"qwen3.block_count": (1, UINT32, None), "qwen3.feed_forward_length": (_N_FF, UINT32, None)}


def widen(tensors: dict[str, Tensor]) -> None:
    """For `changed`: one layer with a feed-forward of 39 MiB."""
    for name in [name for name in tensors if name.startswith("blk.") and name[:6] != "blk.0."]:
        del tensors[name]
    q8_0, random = gguf.GGMLQuantizationType.Q8_0, np.random.default_rng(0)
    for name, shape in (("up", (_N_FF, 512)), ("gate", (_N_FF, 512)), ("down", (512, _N_FF))):
        rows = random.normal(0, 0.02, (64, shape[1])).astype(np.float32)
        data = np.tile(gguf.quantize(rows, q8_0), (shape[0] // 64, 1))
        tensors[f"blk.0.ffn_{name}.weight"] = data, q8_0


def test_a_library_without_rpc_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    known = runtime.function

    def found(name: str, *types: Any) -> Any:
        if "_rpc_" in name:
            raise ImportError(name)
        return known(name, *types)

    monkeypatch.setattr(runtime, "function", found)
    with pytest.raises(BackendError, match=r'built without .*"-DGGML_RPC=ON '):
        workers.serve("127.0.0.1", 50999, (), None, 1)


def test_a_cut_connection_ends_the_request_with_one_line_and_no_process(
    two: list[WorkerProcess],
) -> None:
    network = SlowNetwork(two[0].port)
    with load(network.name()) as model:
        chunks = model.stream("def add(a, b):", max_tokens=500, temperature=0, stop=[])
        next(chunks)
        network.cut()
        with pytest.raises(WorkerLostError, match=f"^the worker {network.name()} is lost: "):
            list(chunks)
        assert model.target.lost
    with load(network.name()) as model:  # it is back
        assert model.generate("def add(a, b):", max_tokens=8).tokens


def test_a_silent_worker_is_given_up(
    two: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_SILENT_S", 0.5)
    with load(two[0].name) as model:
        two[0].process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(WorkerLostError, match="has not answered"):
                model.generate("def add(a, b):", max_tokens=8)
        finally:
            two[0].process.send_signal(signal.SIGCONT)


def test_no_worker_is_one_line() -> None:
    with pytest.raises(WorkerLostError, match=r"no worker answers at 127\.0\.0\.1:1 "):
        load("127.0.0.1:1")
    with pytest.raises(InputError, match="expected HOST:PORT"):
        load("127.0.0.1")


def answering(answer: bytes) -> socket.socket:
    """A stranger that greets everyone with the same bytes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = server.accept()
                end.sendall(answer)
                end.shutdown(socket.SHUT_WR)

    threading.Thread(target=serve, daemon=True).start()
    return server


@pytest.mark.parametrize(
    "greeting, said",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not greet"),
        (struct.pack("<Q", 28) + bytes([VERSION[0] - 1, 0, 0, 0]) + bytes(24), "version 6.0.0 of"),
        (b"", "does not greet"),
    ],
)
def test_a_stranger_gets_nothing_but_a_greeting(greeting: bytes, said: str) -> None:
    with answering(greeting) as server, pytest.raises(WorkerLostError, match=said):
        load(f"127.0.0.1:{server.getsockname()[1]}")


def test_the_version_is_that_of_the_installed_llama_cpp() -> None:
    worker = WorkerProcess()
    worker.kill()
    assert worker.output.startswith(f"Starting RPC server v{'.'.join(map(str, VERSION))}\n")


class Mutating(SlowNetwork):
    """A network that changes the answers of a worker, mostly those before its first tensors."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(port)
        self._random = random.Random(seed)
        self.n_mutated = 0

    def changed(self, data: bytes) -> bytes:
        if not data or self._random.random() < 0.6:
            return data
        self.n_mutated += 1
        at = self._random.randrange(len(data))
        kind = self._random.randrange(4)
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data[:at] + self._random.randbytes(8) + data[at:]
        byte = self._random.choice([0, 1, 0x7F, 0x80, 0xFF, self._random.randrange(256)])
        n = self._random.choice([1, 8])
        return data[:at] + bytes([byte]) * n + data[at + n :]


def use_buffer(device: int) -> None:
    """Use a device as llama.cpp does: memory on it, written and read."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    buffer_type = runtime.function("ggml_backend_dev_buffer_type", pointer, pointer)(device)
    allocate = runtime.function("ggml_backend_buft_alloc_buffer", pointer, pointer, size)
    buffer = allocate(buffer_type, 1 << 16)
    if buffer:
        runtime.function("ggml_backend_buffer_get_base", pointer, pointer)(buffer)
        runtime.function("ggml_backend_buffer_clear", None, pointer, ctypes.c_uint8)(buffer, 0)
        runtime.function("ggml_backend_buffer_free", None, pointer)(buffer)


def n_mutated(worker: WorkerProcess, seed: int, *, whole_load: bool) -> int:
    """Use a worker over such a network. However that ends, this process goes on. The worker may
    not: ggml's server ends on requests that it takes for wrong, as those are that follow from a
    wrong address of a buffer. Then it is begun again."""
    if worker.process.poll() is not None:
        worker.begin()
    network = Mutating(worker.port, seed)
    with contextlib.suppress(dflash_local.DflashError):
        if whole_load:
            with load(network.name()) as model:
                model.generate("def f(", max_tokens=6)
        else:
            workers.remote_devices([network.name()])
            for device in workers.remote_pointers([network.name()]):
                for _ in range(4):
                    use_buffer(device)
    network.cut()
    return network.n_mutated


@pytest.mark.slow
def test_five_hundred_mutated_answers_end_no_process(
    two: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_CONNECT_S", 0.2)  # answers that were cut short are soon given up
    monkeypatch.setattr(relay, "_SILENT_S", 0.5)
    seeds, n = iter(range(1000, 10000)), 0
    while n < 500:
        n += n_mutated(two[0], next(seeds), whole_load=n % 20 == 0)
