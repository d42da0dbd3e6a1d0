"""Requests as bytes, for what no HTTP client would send."""

import json
import socket

from server_process import ServerProcess


def raw(path: str = "/v1/models", *headers: str, version: str = "1.1") -> bytes:
    """A GET request that asks the server to close the connection."""
    lines = [f"GET {path} HTTP/{version}", *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


def posted(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A POST request with a body of JSON, or of that `length` if it says so."""
    n = len(body) if length is None else length
    head = ["Content-Type: application/json", f"Content-Length: {n}", *headers]
    if not any(line.startswith("Host:") for line in headers):
        head.insert(0, "Host: localhost")
    return "\r\n".join([f"POST {path} HTTP/1.1", *head, "", ""]).encode() + body


def exchange(server: ServerProcess, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer. The server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def message(body: bytes) -> str:
    """The message of an error in OpenAI's form."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])
