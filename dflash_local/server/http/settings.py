"""Settings of a server, apart from its models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """A server's address, the clients that it answers, and its limits.

    `api_keys`: any of them opens everything; where there are none, no key is needed.
    `cors_origins`: the web origins that may send requests, besides those of this machine.
    `allowed_hosts`: the names by which the server may be called, besides `host` and this machine's.
    `drain_s`: seconds that running answers get to finish after SIGTERM.
    `max_body`: bytes of a request's body.
    `send_buffer`: bytes that the kernel may hold for a client that does not read; its own default
    would be megabytes.
    A client gets `head_s` seconds to send a request's head, `body_s` to send its body, `read_s` to
    read what is written to it, and `keep_alive_s` to send another request. `strict` refuses
    requests with fields that are not known, or with a model that is not served. `slots`, `metrics`
    and `page` tell whether `/slots`, `/metrics` and the page are there. `verbose` has the answers
    of chats tell their prompt, unless a request says otherwise. With a `reasoning_format` of
    "none" thoughts stay in the content of OpenAI's chats. A `host` that ends with .sock is
    the path of a UNIX socket. All paths begin with `api_prefix`. With the two `ssl` files, PEM, it
    speaks HTTPS.
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
    strict: bool = False
    slots: bool = True
    metrics: bool = True
    page: bool = True
    verbose: bool = False
    reasoning_format: str = "auto"
    api_prefix: str = ""
    ssl_key_file: str | None = None
    ssl_cert_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether it listens at a UNIX socket."""
        return self.host.endswith(".sock")
