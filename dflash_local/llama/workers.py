"""Devices of other machines, by ggml's RPC: theirs for us, and ours for them."""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

from dflash_local.errors import BackendError, InputError, WorkerLostError
from dflash_local.llama import runtime
from dflash_local.llama.host import default_threads
from dflash_local.llama.relay import Connection, Relay
from dflash_local.llama.runtime import Device

_relays: dict[str, Relay] = {}


def remote_devices(workers: Sequence[str]) -> list[Device]:
    """The devices of workers, given as HOST:PORT, with the memory that they have left.

    Raises InputError for any other text, WorkerLostError if none of our version answers.
    """
    found = []
    memory = runtime.function(
        "ggml_backend_dev_memory",
        None,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_size_t),
    )
    for relay in map(_usable_relay, workers):
        for index, device in enumerate(_pointers(relay)):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            memory(device, ctypes.byref(free), ctypes.byref(total))
            relay.current.check()
            name = f"RPC {relay.name}" + (f"/{index}" if index else "")
            size = free.value, total.value
            found.append(Device(name, "a worker", "gpu", *size, is_remote=True))
    return found


def remote_pointers(workers: Sequence[str]) -> list[int]:
    """ggml's handles of the same devices. Raises as `remote_devices`."""
    return [pointer for relay in map(_relay, workers) for pointer in _pointers(relay)]


def connections(workers: Sequence[str]) -> list[Connection]:
    """Those that a model uses that was just loaded."""
    return [_relay(worker).current for worker in workers]


def place(worker: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT. Raises InputError."""
    host, colon, port = str(worker).strip().rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InputError(f"rpc is {worker!r}, expected HOST:PORT, such as 192.168.1.5:50052")
    return host.strip("[]"), int(port)


def serve(
    host: str, port: int, device_names: Sequence[str], cache: str | None, n_threads: int | None
) -> None:
    """Offer devices of this machine to others, until the process ends; without names its GPUs, or
    else the CPU. `cache` is a folder where large tensors are kept. Raises InputError for an unknown
    device, BackendError if the port is taken.
    """
    start = _entry(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    chosen = _own(device_names)
    folder = os.fsencode(cache) + b"/" if cache else None
    start(f"{host}:{port}".encode(), folder, n_threads or default_threads(), len(chosen), chosen)
    raise BackendError(f"{host}:{port} cannot be listened at: the port is taken, or not ours")


def _own(names: Sequence[str]) -> Any:
    """A C array of the handles of devices of this machine."""
    devices = runtime.devices()
    if not names:
        gpus = [d.name for d in devices if d.type in ("gpu", "igpu")]
        names = gpus or [d.name for d in devices if d.type == "cpu"]
    known = [device.name for device in devices]
    for name in names:
        if name not in known:
            raise InputError(f"device is {name!r}; expected one of {', '.join(known)}")
    return (ctypes.c_void_p * len(names))(*map(runtime.device_pointer, names))


def _usable_relay(worker: str) -> Relay:
    """The relay to a worker, or a new one if ggml knows another worker by that. Raises
    WorkerLostError."""
    if not _relay(worker).is_of_use():
        _relays[worker] = Relay(*place(worker))
        if not _relays[worker].is_of_use():
            raise WorkerLostError(f"the worker {worker} tells other devices each time")
    return _relays[worker]


def _relay(worker: str) -> Relay:
    if worker not in _relays:
        _relays[worker] = Relay(*place(worker))
    return _relays[worker]


def _pointers(relay: Relay) -> list[int]:
    add = _entry("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    size_type = ctypes.c_size_t
    count = runtime.function("ggml_backend_reg_dev_count", size_type, ctypes.c_void_p)
    get = runtime.function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, size_type)
    server = add(relay.endpoint.encode())
    if not server:
        raise WorkerLostError(f"the worker {relay.name} offers no device")
    return [get(server, index) for index in range(count(server))]


def _entry(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of libggml-rpc. Raises BackendError if llama.cpp was built without it."""
    runtime.init()
    try:
        return runtime.function(name, result, *arguments)
    except ImportError:
        raise BackendError(
            "this llama-cpp-python was built without ggml's RPC; build it again: "
            f'CMAKE_ARGS="-DGGML_RPC=ON -DGGML_NATIVE=OFF" {runtime.INSTALL}'
        ) from None
