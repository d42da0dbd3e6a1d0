"""`dflash-local worker`: its lines before it listens."""

import socket

import pytest

from command_line import run_here
from dflash_local.cli.worker import warn_of_strangers


def test_an_address_that_strangers_reach_is_told_loudly(capsys: pytest.CaptureFixture[str]) -> None:
    for loopback in ("127.0.0.1", "127.1.2.3"):
        warn_of_strangers(loopback, 50052)
    assert capsys.readouterr().err == ""
    for host in ("0.0.0.0", "192.168.1.5"):
        warn_of_strangers(host, 50052)
        said = capsys.readouterr().err
        assert said.startswith(f"WARNING: {host}:50052 HAS NO PASSWORD.")
        assert "SSH tunnel" in said and len(said.splitlines()) == 1


def test_bad_places_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = run_here("worker", "--port", str(taken.getsockname()[1]))
    assert found.returncode == 1 and "cannot listen at 127.0.0.1:" in found.stderr
    assert "expected an IPv4 address" in run_here("worker", "--host", "example.org").stderr
    found = run_here("worker", "--port", "50999", "--device", "CUDA7")
    assert found.returncode == 2 and "device is 'CUDA7'" in found.stderr
    found = run_here("complete", "--rpc", "here", "x")
    assert found.returncode == 2 and "expected HOST:PORT" in found.stderr
