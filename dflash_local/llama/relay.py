"""The way from this process to a worker on another machine: one that cannot end the process.

ggml's RPC client aborts on a lost connection and believes any answer of a worker. So it talks to a
`Relay` here, on loopback, which talks to the worker. The relay checks the version before anything
is sent, and each answer before it is passed on. Once a worker is lost, it answers in its place, so
that llama.cpp comes to the end of what it does; `Connection.check` then raises, and the results
since are dropped.

It also saves waiting. ggml fetches one tensor after the other, each for a whole way there and back.
The data fetched after a graph the last time are asked for here together with that graph, so that
all answers to a pass come together.
"""

import hashlib
import selectors
import socket
import struct
import threading
from collections import deque
from contextlib import suppress

from dflash_local.errors import WorkerLostError

VERSION = (7, 0, 0)
"""Of the protocol of the pinned llama.cpp (RPC_PROTO_*_VERSION in ggml-rpc.h)."""

# Commands (rpc_cmd in ggml-rpc.cpp).
_ALLOC, _ALIGNMENT, _MAX_SIZE, _BASE, _FREE = range(5)
_SET_HASH, _GET_TENSOR, _COPY, _GRAPH, _MEMORY = 7, 8, 9, 10, 11
_ALLOC_SIZE, _HELLO, _COUNT, _AGAIN = 13, 14, 15, 16
_ANSWER_BYTES = {_ALLOC: 16, _BASE: 8, _SET_HASH: 1, _COPY: 1, _MEMORY: 16, _ALLOC_SIZE: 8}
"""The commands that are passed on and answered, besides GET_TENSOR, whose request says how long."""
_HEAD = struct.Struct("<BQ")
_U64 = struct.Struct("<Q")
_CAPS = bytes(24)  # no RDMA, which would go past the relay

_CONNECT_S = 5.0
_SILENT_S = 120.0
"""The longest that a worker may take for a pass, or to take in its data."""
_WHOLE = 64 << 20  # bytes of a request that is read before it is sent on
_CHUNK = 1 << 20
_AHEAD = 16 << 20  # bytes that are asked for ahead: a pass of drafts, but no long prompt's
_GRAPHS = 64  # whose fetches are remembered
_FAR = 1 << 46  # more bytes than any machine has


class Connection:
    """One connection of ggml's client to a worker, until either end closes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost = ""
        """The reason why there is no worker any more; empty while there is one."""

    def check(self) -> None:
        """Raises WorkerLostError once the worker is lost."""
        if self.lost:
            raise WorkerLostError(f"the worker {self.name} is lost: {self.lost}")


class Relay:
    """Connects ggml's client with the worker at `host` and `port`. It lives as long as the process:
    ggml knows the worker's devices by the relay's address for good. If they are others now, and
    after a loss, when ggml may have kept an answer that was none, it takes a new relay."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"{host}:{port}"
        self._address = host, port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.current = Connection(self.name)
        """The last connection of ggml's client."""
        self._devices: list[tuple[int, int]] = []  # alignment and largest buffer of each
        self._is_idle = threading.Event()
        self._is_idle.set()
        name = f"dflash-local rpc {self.name}"
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def is_of_use(self) -> bool:
        """Whether a worker answers, is of our version, and has the devices that ggml knows by this
        relay. Raises WorkerLostError."""
        if self.current.lost:
            return False
        if not self._is_idle.is_set():
            return True
        with self._connected() as worker:
            try:
                found = _devices_of(worker)
            except OSError:
                raise WorkerLostError(f"the worker {self.name} does not tell its devices") from None
        self._devices = self._devices or found
        return found == self._devices

    def _connected(self) -> socket.socket:
        """A connection on which versions were compared, and nothing else was sent."""
        try:
            worker = socket.create_connection(self._address, _CONNECT_S)
        except OSError as error:
            raise WorkerLostError(
                f"no worker answers at {self.name} ({error.strerror or error}): start one there "
                "with `dflash-local worker`"
            ) from None
        try:
            _prepare(worker)
            worker.sendall(_HEAD.pack(_HELLO, len(_CAPS)) + _CAPS)
            if _U64.unpack(_read(worker, 8))[0] != 4 + len(_CAPS):
                raise ConnectionError
            found = tuple(_read(worker, 4 + len(_CAPS))[:3])
        except OSError:
            worker.close()
            raise WorkerLostError(
                f"the worker {self.name} does not greet: it serves another client, or is no worker"
            ) from None
        if found != VERSION:
            worker.close()
            theirs, ours = (".".join(map(str, version)) for version in (found, VERSION))
            raise WorkerLostError(
                f"the worker {self.name} speaks version {theirs} of ggml's RPC, and this machine "
                f"{ours}: install the same llama-cpp-python on both"
            )
        worker.settimeout(_SILENT_S)
        return worker

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            connection = self.current = Connection(self.name)
            self._is_idle.clear()
            worker = None
            try:
                worker = self._connected()
            except WorkerLostError as error:
                connection.lost = str(error)
            with client, suppress(OSError, struct.error):  # ggml's client has closed it
                _prepare(client)
                _Exchange(client, worker, connection, self._devices).run()
            if worker is not None:
                worker.close()
            self._is_idle.set()


class _Exchange:
    """Requests and answers of one connection, in order."""

    def __init__(
        self,
        client: socket.socket,
        worker: socket.socket | None,
        connection: Connection,
        devices: list[tuple[int, int]],
    ) -> None:
        self._client, self._worker, self._connection = client, worker, connection
        self._devices = devices
        self._ahead: deque[bytes] = deque()  # requests that were sent before they were asked
        self._fetches: dict[bytes, list[bytes]] = {}  # what was fetched after each graph
        self._graphs: dict[bytes, bytes] = {}  # the last one of each device
        self._fetched: list[bytes] = []  # since the last graph
        self._ready = selectors.DefaultSelector()
        for end in filter(None, (client, worker)):
            self._ready.register(end, selectors.EVENT_READ)

    def run(self) -> None:
        """Answer until the client closes the connection. Raises OSError then."""
        with self._ready:
            while True:
                self._wait()
                command, size = _HEAD.unpack(_read(self._client, _HEAD.size))
                if command == _HELLO:
                    _read(self._client, size)
                    self._answer(bytes([*VERSION, 0]) + _CAPS)
                elif size > _WHOLE:
                    self._pass_on(command, size)
                else:
                    self._handle(command, _read(self._client, size))

    def _wait(self) -> None:
        """Until there is a request. Data that a worker sends unasked end its connection: the model
        is known to be lost before it is used again."""
        if self._worker is None or self._ahead:
            return
        if all(key.fileobj is self._worker for key, _ in self._ready.select()):
            self._lose("the connection was closed")

    def _handle(self, command: int, request: bytes) -> None:
        if command == _GET_TENSOR:
            self._answer(self._tensor(request))
            return
        if command in (_COUNT, _ALIGNMENT, _MAX_SIZE):  # known, and ggml keeps them for good
            self._answer(self._known(command, request))
            return
        self._drop_ahead()
        self._send(_HEAD.pack(command, len(request)) + request)
        if command in (_GRAPH, _AGAIN):
            self._fetch_ahead(command, request)
        elif command == _FREE:
            self._fetches.clear()  # a worker closes the connection on a fetch from what was freed
        elif command in _ANSWER_BYTES:
            answer = self._received(_ANSWER_BYTES[command])
            if answer is not None and not self._is_sound(command, request, answer):
                self._lose("it sends answers that make no sense")
                answer = None
            self._answer(_in_its_place(command, request) if answer is None else answer)

    def _known(self, command: int, request: bytes) -> bytes:
        if command == _COUNT:
            return struct.pack("<I", len(self._devices))
        alignment, most = self._devices[int.from_bytes(request, "little")]
        return _U64.pack(alignment if command == _ALIGNMENT else most)

    def _pass_on(self, command: int, size: int) -> None:
        """A request that is too large to be kept: weights, mostly. It has no answer."""
        self._drop_ahead()
        self._send(_HEAD.pack(command, size))
        while size:
            chunk = _read(self._client, min(size, _CHUNK))
            self._send(chunk)
            size -= len(chunk)

    def _fetch_ahead(self, command: int, request: bytes) -> None:
        device = request[:4]
        if command == _GRAPH:
            self._graphs[device] = hashlib.sha256(request).digest()
        if len(self._fetches) >= _GRAPHS:
            self._fetches.clear()
        graph = self._graphs.get(device, b"")
        room = _AHEAD
        for fetch in self._fetches.get(graph, []):
            room -= _size_of(fetch)
            if room < 0:
                break
            self._ahead.append(fetch)
        self._send(b"".join(_HEAD.pack(_GET_TENSOR, len(each)) + each for each in self._ahead))
        self._fetched = self._fetches[graph] = []

    def _tensor(self, request: bytes) -> bytes:
        size = _size_of(request)
        if self._ahead and self._ahead[0] == request:
            self._ahead.popleft()
        else:
            self._drop_ahead()
            self._send(_HEAD.pack(_GET_TENSOR, len(request)) + request)
        self._fetched.append(request)
        answer = self._received(size)
        return bytes(size) if answer is None else answer

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._received(_size_of(self._ahead.popleft()))

    def _is_sound(self, command: int, request: bytes, answer: bytes) -> bool:
        """Whether ggml can live with an answer: it asserts some of this, and believes the rest."""
        words: list[int] = [_U64.unpack_from(answer, at)[0] for at in range(0, len(answer) - 7, 8)]
        if command == _ALLOC:
            asked = _U64.unpack_from(request, 4)[0]
            return not words[0] or asked <= words[1] < _FAR
        if command == _BASE:
            return 0 < words[0] < 1 << 62 and not any(words[0] % n for n, _ in self._devices)
        if command == _MEMORY:
            return words[0] <= words[1] < _FAR
        if command == _ALLOC_SIZE:
            return words[0] < _FAR
        return answer[0] <= 1

    def _send(self, data: bytes) -> None:
        if self._worker is not None and data:
            try:
                self._worker.sendall(data)
            except OSError as error:
                self._lose(_why(error))

    def _received(self, size: int) -> bytes | None:
        """An answer of that size; None if there is no worker any more."""
        if self._worker is None:
            return None
        try:
            if _U64.unpack(_read(self._worker, 8))[0] != size:
                self._lose("it sends answers of a wrong size")
                return None
            return _read(self._worker, size)
        except OSError as error:
            self._lose(_why(error))
            return None

    def _answer(self, answer: bytes) -> None:
        self._client.sendall(_U64.pack(len(answer)) + answer)

    def _lose(self, why: str) -> None:
        """Before any answer in the worker's place is sent: who gets it can see that it is none."""
        self._connection.lost = why
        if self._worker is not None:
            self._ready.unregister(self._worker)
            self._worker.close()
        self._worker = None
        self._ahead.clear()


def _devices_of(worker: socket.socket) -> list[tuple[int, int]]:
    """Alignment and largest buffer of each device. Raises OSError for impossible ones."""
    n = _asked(worker, _COUNT, b"", 4)
    devices = [struct.pack("<I", index) for index in range(n)] if n <= 16 else []
    found = [(_asked(worker, _ALIGNMENT, d, 8), _asked(worker, _MAX_SIZE, d, 8)) for d in devices]
    aligned = all(0 < n <= 1 << 12 and n & (n - 1) == 0 for n, _ in found)
    if not found or not aligned or min(most for _, most in found) < 1 << 24:
        raise ConnectionError
    return found


def _asked(worker: socket.socket, command: int, request: bytes, size: int) -> int:
    worker.sendall(_HEAD.pack(command, len(request)) + request)
    if _U64.unpack(_read(worker, 8))[0] != size:
        raise ConnectionError
    return int.from_bytes(_read(worker, size), "little")


def _in_its_place(command: int, request: bytes) -> bytes:
    """An answer with which llama.cpp comes to an end. Nothing is ever read from such a buffer."""
    if command == _ALLOC:
        return _U64.pack(1 << 32) + request[4:12]
    if command == _BASE:
        return _U64.pack(1 << 32)
    if command in (_SET_HASH, _COPY):
        return b"\1"
    return bytes(_ANSWER_BYTES[command])


def _size_of(fetch: bytes) -> int:
    size: int = _U64.unpack(fetch[-8:])[0]
    return size


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"it has not answered for {_SILENT_S:.0f} seconds"
    return error.strerror or str(error)


def _prepare(end: socket.socket) -> None:
    """Send at once, and notice that the other machine is gone."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def _read(end: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError if the other end closes first."""
    data = bytearray(size)
    view, n = memoryview(data), 0
    while n < size:
        got = end.recv_into(view[n:])
        if not got:
            raise ConnectionResetError("the connection was closed")
        n += got
    return bytes(data)
