"""A stand-in for llama-server: a real process with its endpoints and its ways to fail, no model.

Run by the program that `program` makes. `STAND_IN` in the environment says how it behaves.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def program(folder: Path) -> Path:
    """An executable that behaves like llama-server, in `folder`, where it leaves its notes."""
    path = folder / "llama-server"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from llama_server_stand_in import main\nmain({str(folder)!r})\n"
    )
    path.chmod(0o755)
    return path


def runs(folder: Path) -> list[list[str]]:
    """The arguments of each run of the program in `folder`."""
    return _notes(folder / "runs.jsonl")


def requests(folder: Path) -> list[dict[str, Any]]:
    """The bodies of all requests, in the order in which they came."""
    return _notes(folder / "requests.jsonl")


def _notes(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alive(folder: Path) -> bool:
    """Whether the last run is still going."""
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def main(folder: str) -> None:
    mode, arguments = os.environ.get("STAND_IN", ""), sys.argv[1:]
    with Path(folder, "runs.jsonl").open("a") as notes:
        notes.write(json.dumps(arguments) + "\n")
    Path(folder, "pid").write_text(str(os.getpid()))
    port = int(arguments[arguments.index("--port") + 1])
    if mode == "dies":
        print("0.00.001.000 I srv  load_model: loading model", flush=True)
        print("0.00.002.000 E cmn  common_init_: failed to load model 'x.gguf'", flush=True)
        print("0.00.003.000 I srv  operator(): cleaning up before exit...", flush=True)
        sys.exit(3)
    if mode == "silent death":
        sys.exit(4)
    if mode == "taken" and len(runs(Path(folder))) == 1:
        print(f"E srv  couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}")
        sys.exit(1)
    if mode == "deaf":
        print("I srv  waiting for a model that never comes", flush=True)
        Path(folder, "said").touch()
        time.sleep(600)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.mode = mode  # type: ignore[attr-defined]
    server.notes = Path(folder, "requests.jsonl")  # type: ignore[attr-defined]
    server.healthy_after = 1  # type: ignore[attr-defined]
    server.serve_forever(0.05)


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        self.server.healthy_after -= 1
        if self.server.healthy_after >= 0:
            return self.reply(503, {"error": {"message": "Loading model"}})
        return self.reply(200, {"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.notes.open("a") as notes:
            notes.write(json.dumps(asked) + "\n")
        mode = self.server.mode
        if mode == "dies in a request":
            print("GGML_ASSERT(ctx != nullptr) failed", flush=True)
            os._exit(134)
        if mode == "refuses":
            message = "request (30 tokens) exceeds the available context size (16 tokens)"
            return self.reply(400, {"error": {"code": 400, "message": message}})
        if mode == "another program":
            return self.reply(200, {"hello": "world"})
        if mode == "no json":
            return self.reply(200, None)
        n = asked["n_predict"]
        timings = {"prompt_ms": 250.0, "predicted_n": n, "predicted_ms": 500.0}
        if "-md" in sys.argv:
            timings |= {"draft_n": 30, "draft_n_accepted": 5}
        return self.reply(200, {"content": "", "timings": timings})

    def reply(self, status: int, said: object) -> None:
        body = b"<html>" if said is None else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet: only what llama-server would say."""
