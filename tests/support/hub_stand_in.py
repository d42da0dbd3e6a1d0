"""A hub on the loopback: the part of its HTTP interface that the huggingface_hub client uses.

Two servers, because weights come from another host than the rest: the hub answers a request for
them with a redirect to a storage server, whose addresses are signed and take no token.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files by commit. `gated` and `private` need a token; of these, `members` has access."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False
    on_xet: bool = False
    """Says so in its answers, and serves no Xet: plain HTTP must do."""


@dataclass(frozen=True)
class Request:
    """A request, and the number of bytes served."""

    server: str
    method: str
    path: str
    range: str | None
    token: str | None
    status: int
    n_bytes: int


@dataclass
class Hub:
    """The state and the record of the servers. Change it between requests as a test needs."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    """Old hub id to new."""
    tokens: dict[str, bool] = field(default_factory=dict)
    """The tokens that there are, and whether they have access to gated repositories."""
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""
    storage: str = ""
    breaks: list[int] = field(default_factory=list)
    """The next transfers from storage end after so many bytes, without another word."""
    ignores_ranges: bool = False
    corrupts: bool = False
    status: int | None = None
    """Every answer has this status, as if the hub had trouble."""
    stalls: threading.Event | None = None
    """Storage sends half of a file, sets this and says nothing more. Pieces of a file that are
    asked for by their ends come whole."""

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> str:
        """Commit `files` to the branch main of `name`; the commit."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in files.items():
            digest.update(path.encode() + b"\0" + content)
        commit = digest.hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}, **options))
        repository.commits[commit] = files
        repository.refs["main"] = commit
        return commit

    def served(self, server: str, suffix: str = "") -> list[int]:
        """Bytes of each body that `server` sent for addresses that end so."""
        return [
            request.n_bytes
            for request in self.requests
            if request.server == server
            and request.method == "GET"
            and request.path.endswith(suffix)
        ]


@contextmanager
def running() -> Iterator[Hub]:
    """A hub without repositories, on ports of its own."""
    hub = Hub()
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": hub}))
        for kind in (_HubHandler, _StorageHandler)
    ]
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{each.server_port}" for each in servers)
    threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    server_name = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(urlsplit(self.path).path)

    def do_HEAD(self) -> None:
        self.answer(urlsplit(self.path).path)

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def token(self) -> str | None:
        value = self.headers.get("Authorization")
        return value.removeprefix("Bearer ") if value else None

    def reply(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, sent: int = -1
    ) -> None:
        """Headers for the whole `body`, of which the first `sent` bytes follow."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        part = b"" if self.command == "HEAD" else body if sent < 0 else body[:sent]
        self.hub.requests.append(
            Request(
                self.server_name,
                self.command,
                self.path,
                self.headers.get("Range"),
                self.token(),
                status,
                len(part),
            )
        )
        try:
            self.wfile.write(part)
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: `Hub.requests` is the log."""


class _HubHandler(_Handler):
    server_name = "hub"

    def answer(self, path: str) -> None:
        if self.hub.status is not None:
            return self.reply(self.hub.status)
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            return self.tree(f"{parts[2]}/{parts[3]}", parts[5], "/".join(parts[6:]))
        if parts[:2] == ["api", "models"] and len(parts) in (4, 6):
            return self.info(f"{parts[2]}/{parts[3]}", parts[5] if len(parts) == 6 else "main")
        if parts[0] == "datasets":  # known here by their whole address
            parts[:2] = ["/".join(parts[:2])]
        if len(parts) >= 5 and parts[2] == "resolve":
            return self.resolve(f"{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:]))
        return self.refuse(404, "", "Not found")

    def refuse(self, status: int, code: str, message: str) -> None:
        self.reply(status, headers={"X-Error-Code": code, "X-Error-Message": message})

    def open(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and commit, or None after the reason has been sent."""
        if name in self.hub.moved:
            address = self.path.replace(name, self.hub.moved[name])
            self.reply(307, headers={"Location": address})
            return None
        token = self.token()
        if token is not None and token not in self.hub.tokens:
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.hub.tokens.get(token or "")):
            # it does not tell which exist to whom it does not know
            self.refuse(401 if token is None else 404, "RepoNotFound", "Repository not found")
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    def info(self, name: str, revision: str) -> None:
        found = self.open(name, revision)
        if found is None:
            return
        repository, commit = found
        answer = {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "siblings": [
                {"rfilename": path, "size": len(content), "blobId": "0" * 40}
                for path, content in repository.commits[commit].items()
            ],
        }
        body = json.dumps(answer).encode()
        self.reply(200, body, {"Content-Type": "application/json"})

    def tree(self, name: str, revision: str, folder: str) -> None:
        found = self.open(name, revision)
        if found is None:
            return
        repository, commit = found
        files = [
            {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
            for path, content in repository.commits[commit].items()
            if path.rpartition("/")[0] == folder
        ]
        self.reply(200, json.dumps(files).encode(), {"Content-Type": "application/json"})

    def resolve(self, name: str, revision: str, path: str) -> None:
        found = self.open(name, revision)
        if found is None:
            return None
        repository, commit = found
        if repository.gated and not self.hub.tokens.get(self.token() or ""):
            status = 401 if self.token() is None else 403
            return self.refuse(status, "GatedRepo", f"Access to model {name} is restricted.")
        content = repository.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        if not path.endswith((".safetensors", ".gguf", ".bin", ".pt")):
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
            return self.reply(200, content, headers | {"ETag": f'"{digest.hexdigest()}"'})
        digest = hashlib.sha256(content)
        headers["X-Linked-Etag"] = f'"{digest.hexdigest()}"'
        headers["X-Linked-Size"] = str(len(content))
        headers["Location"] = f"{self.hub.storage}/{digest.hexdigest()}?signature=1"
        if repository.on_xet:
            headers["X-Xet-Hash"] = digest.hexdigest()
            headers["X-Xet-Refresh-Route"] = f"/api/models/{name}/xet-read-token/{commit}"
        return self.reply(302, headers=headers)


class _StorageHandler(_Handler):
    server_name = "storage"

    def answer(self, path: str) -> None:
        content = self.find(path.strip("/"))
        if content is None or self.headers.get("Authorization"):
            return self.reply(403)
        status, headers, start, end = 200, {"Accept-Ranges": "bytes"}, 0, len(content)
        asked = self.headers.get("Range")
        if asked is not None and not self.hub.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first)
            if start >= len(content):
                return self.reply(416, headers={"Content-Range": f"bytes */{len(content)}"})
            status = 206
            end = min(int(last) + 1, len(content)) if last else len(content)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        body = content[start:end]
        if self.hub.corrupts:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.hub.stalls is not None and (asked is None or asked.endswith("-")):
            self.close_connection = True
            self.reply(status, body, headers, sent=len(body) // 2)
            self.hub.stalls.set()
            with suppress(ConnectionError):
                self.rfile.read(1)  # until the client goes away
            return None
        sent = -1
        if self.hub.breaks:
            sent = self.hub.breaks.pop(0)
            self.close_connection = True
        return self.reply(status, body, headers, sent)

    def find(self, digest: str) -> bytes | None:
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        return content
        return None
