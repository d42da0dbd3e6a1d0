"""From a bound socket to the end of the process: serve, drain, stop.

SIGTERM drains: no new request begins, and running ones get time to finish. Ctrl-C, or another
signal, ends at once.
"""

import asyncio
import errno
import gc
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from dflash_local.errors import InputError
from dflash_local.server.app import create_app
from dflash_local.server.http.access_log import log_to_stderr
from dflash_local.server.http.connection import BoundedConnection
from dflash_local.server.http.drain import Drain
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool

_MAX_HEAD = 64 << 10
_FLUSH_S = 5
"""Seconds that a client gets to read the rest of an answer when the server ends."""
_BACKLOG = 50
"""Connections that asyncio accepts at once. If it finds no more files for one, it logs a line
for each that it may accept, and the lines multiply."""
_UNCOUNTED = 3 * _BACKLOG
"""Connections that it may accept before the first of them is counted."""
_OTHER_FILES = 80
"""Open files of the models, of the devices and of the children."""


def bind(settings: ServerSettings) -> socket.socket:
    """A socket bound to an address, but not listening: no client has to wait for the model to load.

    Raises InputError if that address is not available.
    """
    host, port = settings.host, settings.port
    _check_certificate(settings)
    if settings.is_local:
        return _bind_path(host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise InputError(
            f"--host {host!r} is not an address of this machine: give one, such as 127.0.0.1"
        ) from None
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows two servers could share a port with it
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(_bind_fault(host, port, error)) from None
    return bound


def _bind_path(path: str) -> socket.socket:
    """A UNIX socket that only this user may use, in place of one that nobody listens at."""
    if not hasattr(socket, "AF_UNIX"):
        raise InputError(f"--host {path}: this system has no UNIX sockets")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and bound.connect_ex(path) != 0:
            Path(path).unlink()
        bound.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        bound.close()
        raise InputError(f"cannot listen on --host {path}: {error.strerror or error}") from None
    return bound


def _check_certificate(settings: ServerSettings) -> None:
    """Refuse half a certificate, or a bad one, before a model is loaded. Raises InputError."""
    key, certificate = settings.ssl_key_file, settings.ssl_cert_file
    if (key is None) != (certificate is None):
        raise InputError("--ssl-key-file and --ssl-cert-file belong together; give both")
    if key is not None and certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            told = getattr(error, "reason", None) or error.strerror
            raise InputError(
                f"--ssl-cert-file {certificate} and --ssl-key-file {key} are no pair in PEM: {told}"
            ) from None


def _bind_fault(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is taken: stop what uses it, or choose another with --port "
            "(0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs rights that this user does not have: choose one from 1024"
    return f"cannot listen on --host {host}: {error.strerror}"


def serve(
    pool: ModelPool, settings: ServerSettings, bound: socket.socket, say: Callable[[str], None]
) -> int:
    """Serve the models of `pool` on a bound socket until a signal ends it, and close them. Returns
    the exit code of the process.

    `say` gets lines for the user, such as where it serves.
    """
    log_to_stderr()
    settings = replace(settings, max_connections=_most_connections(settings))
    server = Server(create_app(pool, settings), settings, say)
    server.greeting = greeting(pool.names, pool.writers, settings, bound)
    # Else a large body, which makes many objects, has the collector go through all modules: that
    # takes longer than all the rest, and holds up the event loop.
    gc.collect()
    gc.freeze()
    try:
        server.run(sockets=[bound])
    finally:
        closed = pool.close()
        if settings.is_local:
            Path(settings.host).unlink(missing_ok=True)
    if not closed:  # a load is inside of llama.cpp or waits for a trial: Python would wait for it
        say("a model was still being loaded; the load is abandoned")
        os._exit(server.exit_code)
    return server.exit_code


def _most_connections(settings: ServerSettings) -> int:
    """As many as the process may have files for."""
    if sys.platform == "win32":
        return settings.max_connections
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.max_connections + _UNCOUNTED + _OTHER_FILES
    if files < needed and files != resource.RLIM_INFINITY:
        files = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        return max(files - _UNCOUNTED - _OTHER_FILES, 1)
    return settings.max_connections


class Server(uvicorn.Server):
    """uvicorn's server, with draining."""

    def __init__(self, app: FastAPI, settings: ServerSettings, say: Callable[[str], None]) -> None:
        config = uvicorn.Config(
            app,
            http=partial(BoundedConnection, settings),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(settings.keep_alive_s),
            timeout_graceful_shutdown=_FLUSH_S,
            h11_max_incomplete_event_size=_MAX_HEAD,
            ssl_keyfile=settings.ssl_key_file,
            ssl_certfile=settings.ssl_cert_file,
        )
        super().__init__(config)
        self.exit_code = 0
        self.greeting: list[str] = []
        self._drain: Drain = app.state.drain
        self._pool: ModelPool = app.state.pool
        self._drain_s = settings.drain_s
        self._say = say
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._pool.start()
        for line in self.greeting:
            self._say(line)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, sig)

    def _end(self, sig: int) -> None:
        if sig == signal.SIGTERM and self._drain_task is None:
            self._drain.draining = True
            for connection in self.server_state.connections:
                if isinstance(connection, BoundedConnection):
                    connection.hurry(_FLUSH_S)
            self._drain_task = asyncio.ensure_future(self._finish())
        else:
            self.exit_code = 128 + sig
            self._cut()

    async def _finish(self) -> None:
        n = self._drain.n_running
        if n:
            self._say(
                f"finishing {n} running request{'s' if n > 1 else ''}, within {self._drain_s:g} "
                "seconds; another signal ends at once"
            )
        try:
            await asyncio.wait_for(self._drain.idle.wait(), self._drain_s)
        except asyncio.TimeoutError:
            self._say(f"{self._drain.n_running} requests had to be cut off")
            self._cut()
        self.should_exit = True

    def _cut(self) -> None:
        """End every connection now, which cancels its requests."""
        self._drain.draining = True
        self.should_exit = True
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def greeting(
    names: Sequence[str], writers: Sequence[str], settings: ServerSettings, bound: socket.socket
) -> list[str]:
    """Lines with the models, the address, and an editor's settings for one of the `writers`."""
    shown = ", ".join(names)
    if settings.is_local:
        return [f"serving {shown} at {settings.host}, a UNIX socket"]
    host, port = bound.getsockname()[:2]
    scheme = "https" if settings.ssl_key_file else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.api_prefix}"
    key = "one of yours" if settings.api_keys else "any"
    lines = [f"serving {shown} at {url}"]
    if writers:
        lines.append(
            f"editors: base URL {url}/v1, model {' or '.join(writers)}, API key {key} "
            f"(llama.vim: {url}/infill)"
        )
    return lines
