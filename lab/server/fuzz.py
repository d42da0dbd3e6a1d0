"""Damaged requests, model files and chat templates: is each answered or refused in words?

    python -m lab.server.fuzz --minutes 60

Half of the time clients send a server whose model takes pictures damaged requests, over all its
routes, some with damaged pictures. Then damaged GGUF files go through `inspect` and a load, damaged
checkpoints through `convert`, and damaged chat templates are rendered. Needs the tests' packages.
Prints its findings; exit code 1 if anything failed: an answer of 500 and up, none at all, a
traceback, a process that died, an error of several lines. Inputs that failed are kept in
build/fuzz.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

import httpx

import chat_models
import fuzz_safetensors
import gguf_files
import hf_drafters
import synthetic
import tiny_coder
from command_line import run_here
from damage import damaged_bytes
from dflash_local.chat.template import ChatTemplate
from dflash_local.errors import InputError
from embedding_models import write_bert
from lab.server import stall_server
from lab.server.damaged_json import damaged_value
from lab.server.resources import PATIENCE_S, Health
from server_process import EXACT, ServerProcess, serving
from vision_models import asked, picture, write_projector, write_vision_target

KEPT = Path(__file__).parents[2] / "build" / "fuzz"
N_CLIENTS = 4
STALL_S = 0.1
LEAST = 60
"""Requests of each client, files and templates that are tried, however slow the machine is."""

CHAT = "/v1/chat/completions"
WEATHER = chat_models.WEATHER
SHOWN = picture()
IN_BASE64 = base64.b64encode(SHOWN).decode()
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER["function"]}}
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["\n"],
    "logit_bias": {"7": -1},
    "repeat_penalty": 1.1,
    "dry_multiplier": 0.5,
    "dry_sequence_breakers": ["\n"],
    "draft_width": 8,
    "draft_detail": True,
    "n": 2,
    "stream": True,
}
SEEDS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": SAID, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, **SAMPLED},
        {"messages": SAID, "max_tokens": 2, "tools": [WEATHER], "tool_choice": "auto"},
        {"messages": SAID, "max_tokens": 8, "response_format": FORM},
        {"messages": chat_models.CALLED, "max_tokens": 2, "chat_template_kwargs": {"a": 1}},
        {"messages": [asked("What is it?", SHOWN)], "max_tokens": 2},
    ],
    "/v1/completions": [
        {"prompt": "def f(x):", "max_tokens": 2, "logprobs": 2, "echo": True, **SAMPLED},
        {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "suffix": "}"},
        {"prompt": "x", "max_tokens": 4, "grammar": 'root ::= "a" [b-c]*'},
    ],
    "/v1/responses": [
        {"input": "Hello", "max_output_tokens": 2, "instructions": "Be brief.", "stream": True},
        {"input": [{"type": "message", "role": "user", "content": "Hi"}], "max_output_tokens": 2},
    ],
    "/v1/messages": [
        {
            "model": "any",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "tools": [{"name": "now", "input_schema": {"type": "object"}}],
            "stop_sequences": ["\n"],
            "stream": True,
        }
    ],
    "/api/chat": [{"model": "seeing", "messages": SAID, "options": {"num_predict": 2}}],
    "/api/generate": [
        {"model": "seeing", "prompt": "a", "images": [IN_BASE64], "options": {"num_predict": 2}}
    ],
    "/api/show": [{"model": "seeing"}],
    "/completion": [
        {"prompt": ["a", 5], "n_predict": 2, "n_probs": 2, "json_schema": {"type": "string"}},
        {"prompt": {"prompt_string": "a"}, "n_predict": 2, "cache_prompt": False, **SAMPLED},
    ],
    "/infill": [
        {"input_prefix": "a", "input_suffix": "b", "n_predict": 2, "input_extra": [{"text": "c"}]}
    ],
    "/tokenize": [{"content": "Hello", "add_special": True, "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
ANY_BODY = [{"messages": SAID}, {"input": "Hello"}, {"model": "any", "messages": SAID}]
PIECES = (
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].update(role='x') }}",
    "{% set a = namespace(x=[0]) %}{% for i in range(99) %}{% set a.x = [a.x, a.x] %}{% endfor %}",
    "{{ (9 ** 9 ** 9) | string }}",
    "{{ raise_exception('\x1b[31m\n' * 99) }}",
    "{{ messages | sort | sum }}",
    "{{ cycler.__init__.__globals__ }}",
)


@dataclass
class Found(Health):
    """The outcome of all that was tried."""

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    templates: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    server_alive: bool = False

    def fail(self, name: str, why: str, content: bytes) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / name).write_bytes(content)
        self.failures.append(f"{name}: {why}")


def requests(found: Found, seed: int, until: float) -> None:
    """Clients send a server damaged requests, all at once."""
    with tempfile.TemporaryDirectory() as folder:
        target = write_vision_target(Path(folder, "seeing.gguf"), "qwen3vl")
        write_projector(Path(folder, "mmproj-seeing.gguf"), target)  # it is found there
        files = ["--target", str(target), "--draft", str(tiny_coder.pair()[1])]
        for name, pooling in (("embedder", 1), ("reranker", 4)):
            path = Path(folder, f"{name}.gguf")
            files += ["--embedding-model", str(write_bert(path, pooling=pooling, classifier=True))]
        with serving(
            *(*files, *EXACT, "--ctx", "512", "--parallel", "2", "--queue", "64"),
            *("--slot-save-path", folder),
            command=stall_server.COMMAND,
            environment={"STALL_S": str(STALL_S)},
        ) as server:
            Clients(found, seed, until).run(server)


class Clients:
    def __init__(self, found: Found, seed: int, until: float) -> None:
        self._found, self._seed, self._until = found, seed, until
        self._lock = threading.Lock()

    def run(self, server: ServerProcess) -> None:
        found, pid = self._found, server.process.pid
        with server.client() as client:
            # What the first requests take is no growth.
            before = self._text(client)
            described = client.get("/openapi.json").json()["paths"]
            found.weigh(pid)
        with found.watching(server), ThreadPoolExecutor(N_CLIENTS) as threads:
            jobs = [threads.submit(self._client, server, i, described) for i in range(N_CLIENTS)]
            for job in jobs:
                job.result()
        found.server_alive = server.process.poll() is None
        with server.client() as client:
            if self._text(client) != before:
                found.failures.append("the server's answers are not what they were")
        found.weigh(pid)
        if found.tracebacks:
            found.fail("log", "a traceback", "\n".join(server.log).encode())

    def _text(self, client: httpx.Client) -> str:
        body = {"messages": SAID, "max_tokens": 16, "temperature": 0}
        answer = client.post(CHAT, json=body, timeout=PATIENCE_S)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])

    def _client(self, server: ServerProcess, number: int, described: dict[str, Any]) -> None:
        n, least = number, N_CLIENTS * LEAST
        with server.client() as client:
            while server.process.poll() is None:
                if n >= least and time.monotonic() >= self._until:
                    break
                rng = random.Random(f"{self._seed} request {n}")
                method, path, body = damaged_request(described, rng)
                status, why = self._ask(client, method, path, body)
                with self._lock:
                    self._found.requests += 1
                    self._found.statuses[status] += 1
                    if why:
                        self._found.fail(f"request-{n}", f"{method} {path}: {why}", body)
                n += N_CLIENTS

    def _ask(self, client: httpx.Client, method: str, path: str, body: bytes) -> tuple[str, str]:
        """The status, and the fault of the answer."""
        headers = {"content-type": "application/json"}
        try:
            answer = client.request(method, path, content=body, headers=headers, timeout=PATIENCE_S)
        except httpx.HTTPError as error:
            return "none", f"{type(error).__name__}: {error}"
        status = str(answer.status_code)
        if answer.status_code >= 500:
            return status, f"{status} {answer.text[:300]}"
        return status, "a traceback" if "Traceback" in answer.text else ""


def damaged_request(described: dict[str, Any], rng: random.Random) -> tuple[str, str, bytes]:
    """Method, path and body of a request to one of the routes that the server describes."""
    path = rng.choice(sorted(described))
    method = rng.choice(sorted(described[path]))
    words = ("seeing", "..", "%2e%2e%2f", "a" * 3000, quote("\x00\u202e"), "x?model=1&a")
    filled = path.replace("{name}", rng.choice(words))
    if method != "post":
        return method.upper(), filled, b""
    body = damaged_value(rng.choice(SEEDS.get(path, ANY_BODY)), rng)
    content = json.dumps(body).encode()
    if rng.random() < 0.5:
        shown = base64.b64encode(damaged_bytes(SHOWN, rng, len(SHOWN)))
        content = content.replace(IN_BASE64.encode(), shown)
    if rng.random() < 0.1:
        content = damaged_bytes(content, rng, len(content))
    return "POST", filled, content


def files(found: Found, seed: int, until: float) -> None:
    """Damaged model files, in a child process that may die of them."""
    kinds = ("inspect", "load", "convert", "safetensors")
    n = 0
    with tempfile.TemporaryDirectory() as scratch:
        made = Made(Path(scratch))
        while n < LEAST or time.monotonic() < until:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
                while n < LEAST or time.monotonic() < until:
                    kind = kinds[n % len(kinds)]
                    name, path = f"{kind}-{n}", made.path(kind)
                    rng = random.Random(f"{seed} {name}")
                    n += 1
                    try:
                        outcome = child.submit(made.attempt, kind, path, rng).result(PATIENCE_S)
                    except BrokenProcessPool:
                        found.fail(name, "its process died", content_of(path))
                        break
                    except Exception as error:
                        why = "".join(traceback.format_exception_only(error)).strip()
                        found.fail(name, why, content_of(path))
                        outcome = "failed"
                    found.files[f"{kind}: {outcome}"] += 1


def content_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


class Made:
    """Good files in a folder, and damaged copies of them beside."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._small = gguf_files.small(folder / "small.gguf").read_bytes()
        target = synthetic.write_target(folder / "target.gguf", n_layer=8)
        self._target = target.read_bytes()
        self._drafter = synthetic.write_drafter(folder / "drafter.gguf", target).read_bytes()
        self._hf = hf_drafters.write(folder / "hf", "plain", n_vocab=320)
        self._weights = (self._hf / "model.safetensors").read_bytes()
        self._config = json.loads((self._hf / "config.json").read_text(encoding="utf-8"))
        (folder / "checkpoints").mkdir()

    def path(self, kind: str) -> Path:
        """The file that `attempt` damages."""
        if kind == "convert":
            return self._hf / "model.safetensors"
        return self._folder / f"{kind}.gguf"

    def attempt(self, kind: str, path: Path, rng: random.Random) -> str:
        """The outcome of a damaged file. Raises AssertionError for a forbidden one."""
        match kind:
            case "inspect":
                good = rng.choice([self._small, self._target, self._drafter])
                path.write_bytes(damaged_bytes(good, rng, 20_000))
                return outcome(run_here("inspect", str(path)))
            case "load":
                good = self._target
                path.write_bytes(damaged_bytes(good, rng, rng.choice([20_000, len(good)])))
                options = ("--gpu-layers", "0", "--threads", "1", "--ctx", "64", "-n", "2", "-q")
                width = ("--draft-width", "0")
                command = ("complete", "--target", str(path), *options, *width, "a")
                return outcome(run_here(*command))
            case "convert":
                return self._convert(path, rng)
            case _:
                seed = rng.randrange(2**32)
                fuzz_safetensors.run(30, seed, self._folder / "checkpoints")
                return "30 tried"

    def _convert(self, path: Path, rng: random.Random) -> str:
        end = 8 + int.from_bytes(self._weights[:8], "little")
        kind = rng.randrange(3)
        weights, config = self._weights, self._config
        if kind == 0:
            weights = damaged_bytes(weights, rng, end)
        elif kind == 1:
            weights = fuzz_safetensors.damaged_header(weights, rng)
        else:
            config = damaged_value(config, rng)
        path.write_bytes(weights)
        (self._hf / "config.json").write_text(json.dumps(config), encoding="utf-8")
        out, target = self._folder / "out.gguf", self._folder / "target.gguf"
        out.unlink(missing_ok=True)
        done = run_here("convert", str(self._hf), "--target", str(target), "-o", str(out), "-q")
        assert out.exists() == (done.returncode == 0), (
            f"code {done.returncode}, but a file: {out.exists()}"
        )
        return outcome(done)


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    """ "accepted" or "refused" in one line, which has no control characters."""
    if done.returncode == 0:
        return "accepted"
    last = done.stderr.rstrip("\n").split("\n")[-1]
    assert done.returncode in (1, 2), done
    assert last.startswith("dflash-local: error: "), done
    assert last.isprintable() and len(last) < 2000, done
    return "refused" if done.returncode == 2 else "failed in words"


def templates(found: Found, seed: int, until: float) -> None:
    """Damaged chat templates. After each a good one renders as it did."""
    good = ChatTemplate(chat_models.template("qwen3"), bos="<s>", eos="</s>")
    expected = good.render(chat_models.HELLO)
    n = 0
    while n < LEAST or time.monotonic() < until:
        rng = random.Random(f"{seed} template {n}")
        text = chat_models.template(rng.choice(chat_models.FAMILIES))
        at = rng.randrange(len(text))
        if rng.random() < 0.5:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        text = damaged_bytes(text.encode(), rng, len(text)).decode("utf-8", "replace")
        try:
            what = rendered(text, rng)
            assert good.render(chat_models.HELLO) == expected, "a good one renders otherwise"
        except Exception as error:
            what = "failed"
            found.fail(f"template-{n}", f"{type(error).__name__}: {error}", text.encode())
        found.templates[what] += 1
        n += 1


def rendered(text: str, rng: random.Random) -> str:
    """ "rendered", or "refused" in one line."""
    messages = rng.choice([chat_models.HELLO, chat_models.CALLED, SAID])
    if rng.random() < 0.3:
        messages = damaged_value(messages, rng)
    try:
        ChatTemplate(text, bos="<s>", eos="</s>").render(messages, tools=[WEATHER])
    except InputError as error:
        assert "\n" not in str(error), f"an error of several lines: {str(error)[:300]!r}"
        return "refused"
    return "rendered"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long, at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found, seconds = Found(), 60 * options.minutes
    for part, share in ((requests, 0.5), (files, 0.3), (templates, 0.2)):
        print(f"{part.__name__} ...", file=sys.stderr, flush=True)
        part(found, options.seed, time.monotonic() + share * seconds)
    print(json.dumps(vars(found), indent=2))
    sys.exit(bool(found.failures) or not found.server_alive)


if __name__ == "__main__":
    main()
