"""Models that fit beside each other, and the one to unload if not: by plans, then in a server."""

import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from dflash_local.errors import InputError
from dflash_local.fit.footprint import Use
from dflash_local.fit.plan import Plan
from dflash_local.llama.runtime import Device
from dflash_local.server.models.eviction import Planner, first_to_evict, fits
from dflash_local.server.models.served_model import Claim, ServedModel
from dflash_local.server.models.source import ModelSource
from openai_api import CHAT, user
from server_process import ServerProcess, serving, until
from small_machine import COMMAND

GIB = 1 << 30
LONG = {
    **{"messages": user("def f(x):"), "max_tokens": 400, "ignore_eos": True},
    **{"stream": True, "logprobs": True, "top_logprobs": 20},
}
"""Some 700 KB; at most 160 KB are on their way to a client."""
SHORT = {"prompt": "def f(x):", "max_tokens": 1}


def machine(*, gpu: float, host: float = 64, gpu_total: float = 24) -> list[Device]:
    """One with so many GiB free."""
    return [
        Device("CUDA0", "a GPU", "gpu", int(gpu * GIB), int(gpu_total * GIB)),
        Device("CPU", "a CPU", "cpu", int(host * GIB), 64 * GIB),
    ]


def taken(devices: Sequence[Device], size: float, *, on_gpu: bool, mapped: float = 0) -> Plan:
    """A plan for so many GiB on one of two devices."""
    gpu, host = (
        Use(d.name, d.free, d.total, d.free, int(on_gpu), kv=int(size * GIB) if here else 0)
        for d, here in zip(devices, (on_gpu, not on_gpu), strict=True)
    )
    return Plan(
        n_ctx=8192,
        n_cells=8192,
        n_gpu_layers=32 if on_gpu else 0,
        n_layers=32,
        n_batch=512,
        n_seq=4,
        kv_type="f16",
        tensor_split=None,
        gpus=(gpu,),
        host=host,
        target_name="model.gguf",
        target_bytes=int(size * GIB),
        drafter_name=None,
        drafter_bytes=0,
        kv_bytes=int(size * GIB),
        drafter_kv_bytes=0,
        mapped_bytes=int(mapped * GIB),
    )


def wants(size: float) -> Planner:
    """A model of so many GiB: on the GPU where it fits, else on the host, else nowhere."""

    def plan(devices: Sequence[Device]) -> Plan:
        for device, on_gpu in zip(devices, (True, False), strict=True):
            if size * GIB <= device.free:
                return taken(devices, size, on_gpu=on_gpu)
        raise InputError("the models do not fit")

    return plan


def reads(size: float) -> Planner:
    """A model of so many GiB that the host reads straight from the file."""
    return lambda devices: taken(devices, 0, on_gpu=False, mapped=size)


def loaded(*sizes: float) -> list[Plan]:
    return [taken(machine(gpu=24), size, on_gpu=True) for size in sizes]


@pytest.mark.parametrize(
    ("size", "gpu", "host", "others", "is_room"),
    [
        pytest.param(20, 24, 64, (), True, id="alone"),
        pytest.param(10, 12, 64, (12,), True, id="beside a small one"),
        pytest.param(14, 12, 64, (12,), False, id="it would be pushed off the GPU"),
        pytest.param(14, 12, 2, (12,), False, id="it would not fit at all"),
        pytest.param(30, 12, 64, (12,), True, id="it gets no more alone"),
    ],
)
def test_whether_there_is_room(
    size: float, gpu: float, host: float, others: tuple[float, ...], is_room: bool
) -> None:
    assert fits(wants(size), machine(gpu=gpu, host=host), beside=loaded(*others)) == is_room


def test_nobody_goes_for_one_that_does_not_fit_even_alone() -> None:
    with pytest.raises(InputError, match="do not fit"):
        fits(wants(100), machine(gpu=12), beside=loaded(12))


def test_weights_that_others_read_from_their_files_take_room() -> None:
    others = [taken(machine(gpu=24), 0, on_gpu=False, mapped=40)]
    assert fits(reads(20), machine(gpu=24, host=62), beside=others)
    assert not fits(reads(30), machine(gpu=24, host=62), beside=others)
    assert fits(reads(30), machine(gpu=24, host=62), beside=[])


def test_what_a_gpu_gives_back_is_the_hosts_where_they_share_it() -> None:
    """An Apple machine: 16 GiB for both, of which a model has 8."""
    gpu = Device("MTL0", "a GPU", "gpu", 4 * GIB, 12 * GIB, shares_host=True)
    devices = [gpu, Device("CPU", "a CPU", "cpu", 4 * GIB, 16 * GIB)]
    others = [taken(devices, 8, on_gpu=True)]

    def plan(machine: Sequence[Device]) -> Plan:
        fits = all(device.free >= 10 * GIB for device in machine)
        return taken(machine, 10, on_gpu=fits)

    assert not fits(plan, devices, beside=others)


def served(name: str, last_used: float, *, busy: bool = False) -> ServedModel:
    model = ServedModel(ModelSource(name, Path(name)), last_used=last_used)
    if busy:
        model.running.add(Claim(model, None))
    return model


def test_the_one_used_longest_ago_goes_first() -> None:
    models = [served("a", 3.0), served("b", 1.0), served("c", 2.0)]
    assert first_to_evict(models).name == "b"


def test_idle_ones_go_before_those_at_work() -> None:
    models = [served("a", 1.0, busy=True), served("b", 9.0), served("c", 0.0, busy=True)]
    assert first_to_evict(models).name == "b"
    assert first_to_evict([models[0], models[2]]).name == "c"


@pytest.fixture(scope="module")
def small(cache_folder: Path) -> Iterator[ServerProcess]:
    """Four models, two of which it has room for."""
    with serving(command=COMMAND) as running:
        yield running


def states(server: ServerProcess) -> dict[str, str]:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
    return {entry["id"]: entry["status"]["value"] for entry in listed}


def loaded_names(server: ServerProcess) -> set[str]:
    return {name for name, state in states(server).items() if state == "loaded"}


def use(server: ServerProcess, *names: str) -> None:
    with server.client() as client:
        for name in names:
            answer = client.post("/v1/completions", json={"model": name, **SHORT})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name


@contextmanager
def busy(server: ServerProcess, name: str) -> Iterator[None]:
    """A model at work: its answer is too long to be sent unless it is read, which it is at last."""
    body = {"model": name, **LONG}
    # A buffer of less than a packet, 64 KB here, would be slow to open again once it was full.
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)])
    with server.client(transport=small) as client, client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        assert any(line.startswith("data: ") for line in lines)  # what waits first is told
        yield
        rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


@pytest.mark.slow
def test_the_one_used_longest_ago_leaves(small: ServerProcess) -> None:
    use(small, "a", "b")
    assert loaded_names(small) == {"a", "b"}
    use(small, "a", "c")
    assert loaded_names(small) == {"a", "c"}
    assert "to make room for c" in small.wait_for("^unloading b").string


@pytest.mark.slow
def test_one_with_a_request_stays(small: ServerProcess) -> None:
    use(small, "b", "a")
    with busy(small, "b"):
        use(small, "c")
        assert loaded_names(small) == {"b", "c"}


@pytest.mark.slow
def test_where_all_are_at_work_a_request_waits_until_one_is_not(small: ServerProcess) -> None:
    use(small, "a", "b")
    with ExitStack() as rest, ThreadPoolExecutor() as pool:
        rest.enter_context(busy(small, "b"))
        client = rest.enter_context(small.client())
        body = {"model": "c", **SHORT, "stream": True}
        with busy(small, "a"):
            answer = rest.enter_context(client.stream("POST", "/v1/completions", json=body))
            lines = answer.iter_lines()
            assert next(lines) == ": waiting to load c"
            assert states(small)["c"] == "loading"
            # The one that is to go takes no new requests: it would never be idle.
            again = pool.submit(use, small, "a")
            until(lambda: states(small)["a"] == "loading")
            use(small, "b")
            assert not again.done()
        events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[0].removeprefix("data: "))["model"] == "c"
        again.result()
        assert loaded_names(small) == {"a", "b"}


@pytest.mark.slow
def test_who_leaves_while_waiting_frees_the_place_and_moves_nobody(small: ServerProcess) -> None:
    with busy(small, "a"), busy(small, "b"):
        for _ in range(5):  # more than may wait at once
            with small.client() as client, suppress(httpx.ReadTimeout):
                body = {"model": "c", **SHORT}
                client.post("/v1/completions", json=body, timeout=0.3)
        until(lambda: states(small)["c"] == "unloaded")
        use(small, "a", "b")
        assert loaded_names(small) == {"a", "b"}


@pytest.mark.slow
def test_no_more_wait_for_a_model_than_may(small: ServerProcess) -> None:
    with ExitStack() as answers, small.client() as client:
        answers.enter_context(busy(small, "a"))
        answers.enter_context(busy(small, "b"))
        for _ in range(2):
            waits = answers.enter_context(small.client())
            body = {"model": "c", **SHORT, "stream": True}
            stream = answers.enter_context(waits.stream("POST", "/v1/completions", json=body))
            assert stream.status_code == 200
        refused = client.post("/v1/completions", json={"model": "c", **SHORT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
