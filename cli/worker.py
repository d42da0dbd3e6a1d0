"""`dflash-local worker`: offers this machine's devices to another one."""

import ipaddress
import os
import signal
import socket

import click

from dflash_local import disk_cache
from dflash_local.errors import BackendError

from .options import LOADING, Option, SectionedCommand
from .values import whole

NAME = "worker"
DOCS = "docs/scaling.md"
SECTIONS = {
    "Network": (
        Option("--host ADDRESS", "The address to listen at.", of=NAME, default="127.0.0.1"),
        Option("--port", "The port to listen at.", of=NAME, type=whole(1, 65535), default=50052),
    ),
    "Devices": (
        Option(
            "--device NAME",
            "A device to offer, as `dflash-local --version` lists them; may be repeated.",
            multiple=True,
            show_default="all GPUs, else the CPU",
        ),
        next(option for option in LOADING if option.name == "n_threads"),
    ),
    "Cache": (
        Option(
            "-c --cache",
            "Keep large tensors on this disk, so that they are sent only once.",
            of=NAME,
        ),
    ),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
def worker(
    host: str, port: int, device: tuple[str, ...], n_threads: int | None, cache: bool
) -> None:
    """Offer this machine's GPUs, or its CPU, to a model that is loaded elsewhere with --rpc.

    One other machine at a time is served. There is no authentication: whoever reaches the port can
    read and change all that is computed here, and may take over this account.
    """
    from dflash_local.llama.workers import serve

    warn_of_strangers(host, port)
    check_free(host, port)
    folder = None
    if cache:
        path = disk_cache.folder() / "rpc"
        path.mkdir(parents=True, exist_ok=True)
        folder = str(path)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not see Ctrl-C in ggml's loop
    serve(host, port, device, folder, n_threads)


def warn_of_strangers(host: str, port: int) -> None:
    """Say loudly that an address can be reached from other machines, if it can."""
    from dflash_local.server.http.security import is_loopback

    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise click.UsageError(
            f"--host {host}: expected an IPv4 address, such as 127.0.0.1."
        ) from None
    if not is_loopback(host):
        click.echo(
            f"WARNING: {host}:{port} HAS NO PASSWORD. Whoever reaches it can read and change all "
            "that is computed here, and may take over this account. Listen at 127.0.0.1 and go "
            f"through an SSH tunnel or WireGuard instead: {DOCS}",
            err=True,
        )


def check_free(host: str, port: int) -> None:
    """Refuse a port that is taken, before any device is opened. Raises BackendError."""
    with socket.socket() as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BackendError(f"cannot listen at {host}:{port}: {error.strerror}") from None
