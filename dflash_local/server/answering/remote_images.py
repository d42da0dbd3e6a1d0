"""Pictures at addresses of the web, for a server that was told to fetch them: from public machines
only, and within bounds of size, time and redirects."""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

from dflash_local.errors import InputError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
MOST_SECONDS = 20.0
"""Of a request, for all of its pictures, as are the bytes."""
_MOST_BYTES = 32 << 20
_MOST_REDIRECTS = 3
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("2002::/16")
"""IPv6 that stands for IPv4, which may be private."""


def is_public(ip: IpAddress) -> bool:
    """Whether it is a machine's on the internet, neither this one nor of a network around."""
    return ip.is_global and not ip.is_multicast and not any(ip in net for net in _TRANSLATED)


class RemoteImages:
    """Fetches the pictures of one request."""

    def __init__(self, is_allowed: Callable[[IpAddress], bool] = is_public) -> None:
        self._is_allowed = is_allowed
        self._until = time.monotonic() + MOST_SECONDS
        self._room = _MOST_BYTES

    def fetch(self, address: str) -> bytes:
        """The file at an http or https address. Raises InputError."""
        at = address
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                found = self._get(at)
                if isinstance(found, bytes):
                    return found
                at = urljoin(at, found)
            reason = f"more than {_MOST_REDIRECTS} redirects"
        except TimeoutError:  # of a connection, of what is read, or between them
            reason = f"the images of a request may take {MOST_SECONDS:.0f} s"
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise InputError(f"the image at {address[:80]!r} cannot be fetched: {reason[:200]}")

    def _get(self, address: str) -> bytes | str:
        """A file, or the address that it has moved to."""
        parts = urlsplit(address)
        host, is_secure = parts.hostname, parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise ValueError("only plain http and https addresses are fetched")
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        with contextlib.closing(kind(host, parts.port)) as connection:
            sock = self._connected(host, connection.port)
            if is_secure:
                sock = ssl.create_default_context().wrap_socket(
                    sock, server_hostname=host, do_handshake_on_connect=False
                )
            connection.sock = sock
            # However slowly the other side sends, even its headers.
            timer = threading.Timer(self._left(), _shut, (sock,))
            timer.start()
            try:
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                path = parts._replace(scheme="", netloc="", fragment="").geturl()
                connection.request("GET", path or "/")
                answer = connection.getresponse()
                if answer.status in (301, 302, 303, 307, 308):
                    return answer.headers.get("Location", "")
                if answer.status != 200:
                    raise ValueError(f"its server answers {answer.status}")
                data = answer.read(self._room + 1)
                self._left()
            finally:
                timer.cancel()
        self._room -= len(data)
        if self._room < 0:
            raise ValueError(f"the images of a request may have {_MOST_BYTES >> 20} MiB")
        return data

    def _connected(self, host: str, port: int) -> socket.socket:
        """Connected to what was checked: a name may stand for another machine the next time."""
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        if not self._is_allowed(ipaddress.ip_address(place[0])):
            raise ValueError("it is on no public machine")
        return socket.create_connection((str(place[0]), port), self._left())

    def _left(self) -> float:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
