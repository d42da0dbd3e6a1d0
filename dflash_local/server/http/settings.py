"""What a server is set up with, apart from its models."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names under which a machine reaches itself, as they stand in a Host header, without brackets."""


@dataclass(frozen=True)
class Settings:
    """Where a server listens, whom it answers, and what it puts up with.

    `api_keys`: any of them opens everything; without one nobody is asked. `cors_origins` are the
    web origins, beside those of this machine, that may send requests; `allowed_hosts` the names,
    beside `host` and those of this machine, by which the server may be called. `drain_s`: what
    running answers are given to finish after SIGTERM. `max_body` and `send_buffer` are in bytes, of
    a request and of what a connection may hold back unread in the kernel, where the default would
    be megabytes; `head_s` and `body_s` are what a client is given to send a request's head and
    body, `read_s` to take what is written to it, `keep_alive_s` to send another request.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    drain_s: float = 60.0
    max_body: int = 8 << 20
    max_connections: int = 512
    send_buffer: int = 256 << 10
    head_s: float = 20.0
    body_s: float = 60.0
    read_s: float = 60.0
    keep_alive_s: float = 30.0
