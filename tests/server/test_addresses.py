"""Addresses of a server besides plain HTTP at a port: a UNIX socket, a prefix, HTTPS."""

import os
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

import command_line
from server_process import EXACT, serving

BODY = {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}


@pytest.mark.skipif(os.name != "posix", reason="needs UNIX sockets")
def test_a_unix_socket_answers_its_owner_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with serving("--host", str(path), *EXACT) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403
        taken = command_line.run_here("serve", "--host", str(path))
        assert (taken.returncode, "cannot listen on --host" in taken.stderr) == (2, True)
        server.kill()
        assert path.is_socket()
    with serving("--host", str(path), *EXACT) as server:  # nobody listened there any more
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


def test_all_is_under_the_prefix_and_by_https(certificate: tuple[Path, Path]) -> None:
    key, made = map(str, certificate)
    trust = ssl.create_default_context(cafile=made)
    secured = ("--ssl-key-file", key, "--ssl-cert-file", made)
    with serving("--api-prefix", "/my/llm", *secured, *EXACT) as server:
        assert server.url.startswith("https://") and server.url.endswith("/my/llm")
        with httpx.Client(trust_env=False, verify=trust) as client:
            stream = client.post(f"{server.url}/v1/completions", json={**BODY, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
            assert client.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
            page = client.get(server.url, follow_redirects=True)
            assert page.url.path == "/my/llm/" and "<html" in page.text
            assert client.get(f"{server.url}/page/page.js").status_code == 200
            servers = client.get(f"{server.url}/openapi.json").json()["servers"]
            assert servers == [{"url": "/my/llm"}]
            for path in ("/health", "/my/llmx/health", "/my"):
                outside = client.get(server.url.removesuffix("/my/llm") + path)
                assert outside.status_code == 404
                assert "all paths begin with /my/llm" in outside.json()["error"]["message"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    alternatives = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    paths = ["-keyout", str(key), "-out", str(made), "-addext", alternatives]
    subprocess.run([*command.split(), *paths], check=True, capture_output=True)
    return key, made


def test_half_a_certificate_or_a_bad_one_is_one_line(certificate: tuple[Path, Path]) -> None:
    key, made = map(str, certificate)
    assert "belong together" in command_line.refused("serve", "--ssl-key-file", key)
    swapped = command_line.refused("serve", "--ssl-key-file", made, "--ssl-cert-file", key)
    assert "are no pair in PEM" in swapped


@pytest.mark.parametrize("prefix", ["llm", "/", "/a/", "/a b", "/a?b"])
def test_what_is_no_prefix(prefix: str) -> None:
    assert "such as /llm" in command_line.refused("serve", "--api-prefix", prefix)
