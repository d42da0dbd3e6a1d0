"""Clients that a server answers: by host, origin and key."""

import socket
from typing import Any

import httpx
import pytest

import tiny_coder
from dflash_local.server import page
from guarded_server import BEARER, FRIEND, KEYS
from openai_api import error_of, user
from raw_http import exchange, message, posted, raw
from server_process import ServerProcess

LOCAL_PAGE = "http://localhost:3000"


# Hosts.


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9999", "[::1]", "[::1]:8080"]
)
def test_the_machine_calls_itself(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "evil.example#localhost"),
        *("localhost@evil.example", "127.0.0.1.nip.example", "192.168.0.1", "localhost:80:80"),
        *("localhost.", ""),
    ],
)
def test_a_name_that_is_not_ours_is_refused(client: httpx.Client, host: str) -> None:
    for path in ("/v1/models", "/health", "/no-such-route"):
        refused = error_of(client.get(path, headers={"Host": host}), 403)
        assert "--allowed-host" in refused["message"]


def test_no_host_or_two_are_refused(server: ServerProcess) -> None:
    assert exchange(server, raw(version="1.0"))[0] == 403
    assert exchange(server, raw("/v1/models", "Host: localhost", version="1.0"))[0] == 200
    for headers in ([], ["Host: localhost", "Host: evil.example"]):
        status, body = exchange(server, raw("/v1/models", *headers))
        assert status in (400, 403)
        assert message(body)


def test_allowed_names_and_addresses(guarded: ServerProcess) -> None:
    with guarded.client(headers=BEARER) as client:
        for host in ("llm.example", "LLM.example:443", "192.168.7.7:8080", "[fe80::1]"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403


# Origins.


@pytest.mark.parametrize(
    "origin", [LOCAL_PAGE, "https://localhost", "http://127.0.0.1:8080", "http://[::1]:3000"]
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
        *("https://evil.example", "http://localhost.evil.example", "vscode-webview://1234"),
        *("http://evil.example/http://localhost", "http://localhost:3000.evil.example"),
        *("file://", "null", "", FRIEND),
    ],
)
def test_pages_from_elsewhere_are_refused(client: httpx.Client, origin: str) -> None:
    preflight = {"Access-Control-Request-Method": "POST"}
    for method, headers in (("GET", {}), ("POST", {}), ("OPTIONS", preflight)):
        answer = client.request(method, "/v1/models", headers={"Origin": origin, **headers})
        assert "access-control-allow-origin" not in answer.headers
        assert "--cors-origin" in error_of(answer, 403)["message"]


def test_the_server_s_own_page_is_answered(guarded: ServerProcess) -> None:
    """By whatever name it is called, and behind a proxy that speaks TLS; by no other name."""
    with guarded.client(headers=BEARER) as client:
        for host in ("llm.example", "llm.example:8080", "192.168.7.7:8080"):
            for scheme in ("http", "https"):
                headers = {"Host": host, "Origin": f"{scheme}://{host}"}
                assert client.get("/v1/models", headers=headers).status_code == 200
            for origin in (f"http://{host}1", "http://evil.example", f"http://evil.{host}"):
                headers = {"Host": host, "Origin": origin}
                assert client.get("/v1/models", headers=headers).status_code == 403
        rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert client.get("/v1/models", headers=rebound).status_code == 403


ELSEWHERE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}


def test_what_other_sites_only_show_is_refused(client: httpx.Client) -> None:
    """An image, a frame or a script of a page has no Origin."""
    for path in ("/props", "/v1/models", "/metrics", "/health", "/no-such-route"):
        refused = error_of(client.get(path, headers=ELSEWHERE), 403)
        assert "--cors-origin" in refused["message"]
    assert client.get("/", headers=ELSEWHERE).status_code == 200  # a link may lead to the page
    for site in ("same-origin", "same-site", "none"):
        assert client.get("/props", headers={"Sec-Fetch-Site": site}).status_code == 200
    named = {"Origin": LOCAL_PAGE, **ELSEWHERE}  # a page of this machine, by another name of it
    assert client.get("/props", headers=named).status_code == 200


def test_no_answer_is_shown_elsewhere_or_taken_for_something_else(client: httpx.Client) -> None:
    for path in ("/", "/props", "/v1/models", "/metrics", "/health", "/no-such-route"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"


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


def test_an_allowed_origin_still_needs_a_key(guarded: ServerProcess) -> None:
    with guarded.client(headers={"Origin": FRIEND}) as client:
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
def test_each_key_opens(guarded: ServerProcess, headers: dict[str, str]) -> None:
    with guarded.client(headers=headers) as client:
        for path in ("/v1/models", "/props", "/openapi.json"):
            assert client.get(path).status_code == 200
        body: dict[str, Any] = {"messages": user("Hi"), "model": "tiny-coder-q8_0"}
        for path in ("/v1/messages/count_tokens", "/api/show"):
            assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        *({}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": KEYS[0]}),
        *({"Authorization": f"Basic {KEYS[0]}"}, {"Authorization": f"Bearer {KEYS[0]}x"}),
        {"Authorization": f"Bearer {KEYS[0][:-1]}"},
        {"Authorization": f"Bearer {KEYS[0]} {KEYS[1]}"},
        *({"Authorization": b"Bearer \xff\xfe"}, {"x-api-key": ""}, {"x-api-key": "another"}),
    ],
    ids=str,
)
def test_without_a_key_there_is_nothing(
    guarded: ServerProcess, headers: dict[str, str | bytes]
) -> None:
    with guarded.client(headers=headers) as client:
        for path in (
            *("/v1/models", "/props", "/metrics", "/slots", "/openapi.json", "/no-such-route"),
            *("/v1/chat/completions", "/completion", "/health/", "//health"),
        ):
            method = "POST" if "completion" in path else "GET"
            answer = client.request(method, f"{guarded.url}{path}")
            assert answer.headers["www-authenticate"] == "Bearer"
            error = error_of(answer, 401)
            openai_s = path.startswith("/v1/")
            usual = "invalid_request_error" if openai_s else "authentication_error"
            assert (error["code"], error["type"]) == ("invalid_api_key", usual)
        assert client.get("/health").json() == {"status": "ok"}


def test_the_page_opens_without_a_key(guarded: ServerProcess) -> None:
    """It holds no secret, and is where a key can be given."""
    with guarded.client() as client:
        for path in sorted(page.PATHS):
            assert client.get(path).status_code == 200
        assert client.get("/page/").status_code == 401
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/", headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_body_is_not_read_before_the_key(guarded: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(posted("/v1/completions", b"{", length=1000))
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_no_answer_names_a_path_of_this_machine(client: httpx.Client) -> None:
    folder = str(tiny_coder.pair()[0].parent)
    for path in ("/props", "/v1/models", "/health", "/openapi.json", "/no-such-route"):
        assert folder not in client.get(path).text
