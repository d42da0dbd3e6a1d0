"""Who a server answers: hosts, origins, keys, and what it bears with from those who mean ill."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_local.server import page
from server_process import ServerProcess, serving

KEYS = ("first-key", "second-key")
BEARER = {"Authorization": f"Bearer {KEYS[0]}"}
LOCAL_PAGE = "http://localhost:3000"
FRIEND = "https://chat.example"


@pytest.fixture(scope="module")
def locked(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with keys, an allowed origin and an allowed name, open to other machines."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(f"{KEYS[1]}\n\n")
    with serving(
        *("--host", "0.0.0.0", "--api-key", KEYS[0], "--api-key-file", str(file)),
        *("--cors-origin", FRIEND, "--allowed-host", "llm.example", "--draft-width", "0"),
    ) as running:
        running.url = f"http://127.0.0.1:{running.port}"
        yield running


def exchange(server: ServerProcess, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to raw bytes; the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def raw(path: str = "/v1/models", *headers: str, version: str = "1.1") -> bytes:
    lines = [f"GET {path} HTTP/{version}", *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


def message(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


# Hosts.


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9999", "[::1]", "[::1]:8080"]
)
def test_the_machine_calls_itself(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "evil.example#localhost",
        "localhost@evil.example",
        "127.0.0.1.nip.example",
        "192.168.0.1",
        "localhost:80:80",
        "localhost.",
        "",
    ],
)
def test_a_name_that_is_not_ours_is_refused(client: httpx.Client, host: str) -> None:
    for path in ("/v1/models", "/health", "/no-such-route"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert "--allowed-host" in message(answer.content)


def test_no_host_or_two_are_refused(server: ServerProcess) -> None:
    assert exchange(server, raw(version="1.0"))[0] == 403
    assert exchange(server, raw("/v1/models", "Host: localhost", version="1.0"))[0] == 200
    for headers in ([], ["Host: localhost", "Host: evil.example"]):
        status, body = exchange(server, raw("/v1/models", *headers))
        assert status in (400, 403)
        assert message(body)


def test_allowed_names_and_addresses(locked: ServerProcess) -> None:
    with locked.client(headers=BEARER) as client:
        for host in ("llm.example", "LLM.example:443", "192.168.7.7:8080", "[fe80::1]"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403


# Origins.


@pytest.mark.parametrize(
    "origin",
    [LOCAL_PAGE, "https://localhost", "http://127.0.0.1:8080", "http://[::1]:3000"],
)
def test_pages_of_this_machine_are_answered(client: httpx.Client, origin: str) -> None:
    for path, status in (("/v1/models", 200), ("/no-such-route", 404)):
        answer = client.get(path, headers={"Origin": origin})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost.evil.example",
        "http://evil.example/http://localhost",
        "http://localhost:3000.evil.example",
        "vscode-webview://1234",
        "file://",
        "null",
        "",
        FRIEND,
    ],
)
def test_pages_from_elsewhere_are_refused(client: httpx.Client, origin: str) -> None:
    preflight = {"Access-Control-Request-Method": "POST"}
    for method, headers in (("GET", {}), ("POST", {}), ("OPTIONS", preflight)):
        answer = client.request(method, "/v1/models", headers={"Origin": origin, **headers})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        assert "--cors-origin" in message(answer.content)


def test_the_server_s_own_page_is_answered(locked: ServerProcess) -> None:
    """By whatever name it is called, and behind a proxy that speaks TLS; by no other name."""
    with locked.client(headers=BEARER) as client:
        for host in ("llm.example", "llm.example:8080", "192.168.7.7:8080"):
            for scheme in ("http", "https"):
                headers = {"Host": host, "Origin": f"{scheme}://{host}"}
                assert client.get("/v1/models", headers=headers).status_code == 200
            for origin in (f"http://{host}1", "http://evil.example", f"http://evil.{host}"):
                headers = {"Host": host, "Origin": origin}
                assert client.get("/v1/models", headers=headers).status_code == 403
        rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert client.get("/v1/models", headers=rebound).status_code == 403


def test_two_origins_are_refused_if_one_is_foreign(client: httpx.Client) -> None:
    origins = [("Origin", LOCAL_PAGE), ("Origin", "https://evil.example")]
    assert client.get("/v1/models", headers=origins).status_code == 403


def test_preflight(client: httpx.Client) -> None:
    asked = {
        "Origin": LOCAL_PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    answer = client.options("/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == LOCAL_PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]


def test_an_allowed_origin_still_needs_a_key(locked: ServerProcess) -> None:
    with locked.client(headers={"Origin": FRIEND}) as client:
        refused = client.get("/v1/models")
        assert refused.status_code == 401
        # Or the page could not read why.
        assert refused.headers["access-control-allow-origin"] == FRIEND
        assert client.get("/v1/models", headers=BEARER).status_code == 200
        asked = {"Access-Control-Request-Method": "POST"}
        assert client.options("/v1/models", headers=asked).status_code == 200


# Keys.


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEYS[0]}"},
        {"Authorization": f"bearer {KEYS[1]}"},
        {"x-api-key": KEYS[0]},
        {"X-API-Key": KEYS[1]},
    ],
    ids=str,
)
def test_each_key_opens(locked: ServerProcess, headers: dict[str, str]) -> None:
    with locked.client(headers=headers) as client:
        for path in ("/v1/models", "/props", "/openapi.json"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": KEYS[0]},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": f"Bearer {KEYS[0][:-1]}"},
        {"Authorization": f"Bearer {KEYS[0]} {KEYS[1]}"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"x-api-key": ""},
        {"x-api-key": "another"},
    ],
    ids=str,
)
def test_without_a_key_there_is_nothing(
    locked: ServerProcess, headers: dict[str, str | bytes]
) -> None:
    with locked.client(headers=headers) as client:
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/props"),
            ("GET", "/metrics"),
            ("GET", "/slots"),
            ("GET", "/openapi.json"),
            ("GET", "/no-such-route"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/completion"),
            ("GET", "/health/"),
            ("GET", "//health"),
        ]:
            answer = client.request(method, f"{locked.url}{path}")
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert json.loads(answer.content)["error"]["code"] == "invalid_api_key"
        assert client.get("/health").json() == {"status": "ok"}


def test_the_page_opens_without_a_key(locked: ServerProcess) -> None:
    """It holds no secret, and is where a key can be given."""
    with locked.client() as client:
        for path in sorted(page.PATHS):
            assert client.get(path).status_code == 200
        assert client.get("/page/").status_code == 401
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/", headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_body_is_not_read_before_the_key(locked: ServerProcess) -> None:
    head = ["Host: localhost", "Content-Type: application/json", "Content-Length: 1000"]
    request = "\r\n".join(["POST /v1/completions HTTP/1.1", *head, "", "{"]).encode()
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(request)
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


# What a client may send.


def test_large_bodies_are_refused_before_they_are_read(server: ServerProcess) -> None:
    head = ["Host: localhost", "Content-Type: application/json"]
    lines = ["POST /v1/completions HTTP/1.1", *head, "Content-Length: 99999999999", "", ""]
    status, body = exchange(server, "\r\n".join(lines).encode())
    assert status == 413
    assert "bytes" in message(body)


def test_large_bodies_of_unknown_length_are_refused(server: ServerProcess) -> None:
    head = ["Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    start = "\r\n".join(["POST /v1/completions HTTP/1.1", *head, "", ""]).encode()
    megabyte = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # the server stops reading
            connection.sendall(start)
            for _ in range(64):
                connection.sendall(megabyte)
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(65536)
    # What comes after a connection was closed may overtake the answer.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"prompt": ' * 5000 + b"1" + b"}" * 5000, "recursion"),
        (b'{"temperature": NaN}', "JSON"),
        (b'{"temperature": -Infinity}', "JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": "x"', "JSON"),
        (b"prompt=x", "JSON"),
    ],
    ids=range(9),
)
def test_bodies_that_are_no_json(client: httpx.Client, body: bytes, said: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models"):
        answer = client.post(path, content=body, headers=headers)
        assert answer.status_code == 400
        assert said in message(answer.content)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_refused(client: httpx.Client, kind: str | None) -> None:
    # A page of another origin could send these without being asked about first.
    headers = {"Content-Type": kind} if kind else {}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert "application/json" in message(answer.content)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    ],
    ids=range(6),
)
def test_what_is_no_http_gets_an_error(server: ServerProcess, request_bytes: bytes) -> None:
    try:
        status, body = exchange(server, request_bytes)
    except ConnectionError:  # closed before all of it was read
        return
    assert status == 400
    assert message(body)


def test_no_answer_names_a_path_of_this_machine(
    client: httpx.Client, server: ServerProcess
) -> None:
    from dflash_local import demo

    folder = str(demo.pair()[0].parent)
    for path in ("/props", "/v1/models", "/health", "/openapi.json", "/no-such-route"):
        assert folder not in client.get(path).text


# What is logged.


def test_the_log_has_a_plain_line_for_each_request(server: ServerProcess) -> None:
    begin = len(server.log)
    path = "/a%1b[31mred%0d%0aGET%20/forged?secret=prompt"
    assert exchange(server, raw(path, "Host: localhost"))[0] == 404
    line = server.wait_for("forged", after=begin).string
    assert re.fullmatch(r"127\.0\.0\.1 GET /a\\x1b\[31mred\\r\\nGET /forged 404 \d+ ms", line)
    assert not any("secret" in line for line in server.log[begin:])


def test_the_log_never_has_a_prompt(client: httpx.Client, server: ServerProcess) -> None:
    secret = "correct horse battery staple"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
        for body in ({"prompt": secret}, {"prompt": {secret: secret}}, {secret: 1}):
            client.post(path, json=body)
    client.get(f"/health?prompt={secret}")
    client.get("/last-of-these")
    server.wait_for("/last-of-these")
    assert not any("horse" in line for line in server.log)
