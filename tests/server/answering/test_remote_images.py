"""Pictures at addresses: from public machines only, within bounds."""

import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_local.errors import InputError
from dflash_local.server.answering import remote_images
from dflash_local.server.answering.remote_images import RemoteImages, is_public

FILE = bytes(range(256)) * 400


class _Web(BaseHTTPRequestHandler):
    asked: list[str]
    go_on: threading.Event

    def do_GET(self) -> None:
        self.asked.append(self.path)
        moved = {"/moved": "/file?a=b", "/round": "/round", "/inside": "http://127.0.0.2:1/"}
        status = 302 if self.path in moved else 404 if self.path == "/none" else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", moved[self.path])
        self.end_headers()
        if self.path == "/endless":
            while not self.go_on.is_set():
                self.wfile.write(bytes(1 << 16))
        if self.path == "/slow":
            self.wfile.write(b"a")
            self.go_on.wait()
        if status == 200:
            self.wfile.write(FILE)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def web() -> Iterator[str]:
    handler = type("_OfThis", (_Web,), {"asked": [], "go_on": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        _Web.asked = handler.asked
        yield f"http://127.0.0.1:{server.server_port}"
        handler.go_on.set()
        server.shutdown()
        thread.join()


def _is_this(ip: remote_images.IpAddress) -> bool:
    """In the tests, the machine of the server stands for a public one."""
    return str(ip) == "127.0.0.1"


def test_a_file_is_fetched_also_where_it_has_moved_to(web: str) -> None:
    remote = RemoteImages(_is_this)
    assert remote.fetch(web + "/file") == FILE
    assert remote.fetch(web + "/moved") == FILE
    assert _Web.asked == ["/file", "/moved", "/file?a=b"]


def test_this_machine_is_never_asked(web: str) -> None:
    port = web.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "127.1", "[::ffff:127.0.0.1]", "0.0.0.0"):
        with pytest.raises(InputError, match="cannot be fetched"):
            RemoteImages().fetch(f"http://{host}:{port}/file")
    with pytest.raises(InputError, match="no public machine"):
        RemoteImages(_is_this).fetch(web + "/inside")
    assert _Web.asked == ["/inside"]


@pytest.mark.parametrize(
    "ip",
    [
        *("10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("127.0.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1"),
        *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1"),
    ],
)
def test_addresses_around_are_not_public(ip: str) -> None:
    assert not is_public(ipaddress.ip_address(ip))


def test_addresses_of_the_internet_are_public() -> None:
    for ip in ("8.8.8.8", "2606:4700:4700::1111"):
        assert is_public(ipaddress.ip_address(ip))


@pytest.mark.parametrize(
    ("path", "said"),
    [("/none", "answers 404"), ("/round", "redirects"), ("/endless", "MiB"), ("/slow", "may take")],
)
def test_what_is_not_a_file_within_bounds_is_refused(
    path: str, said: str, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/slow":
        monkeypatch.setattr(remote_images, "MOST_SECONDS", 0.3)
    with pytest.raises(InputError, match=said):
        RemoteImages(_is_this).fetch(web + path)


@pytest.mark.parametrize("address", ["http://a@127.0.0.1/", "http:///x", "http://127.0.0.1:x/"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InputError, match="cannot be fetched"):
        RemoteImages(_is_this).fetch(address)
