"""A running llama-server: a program of the user's own, given the same files and prompts."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import BackendError, InputError

_HOST = "127.0.0.1"
_POLL_S = 0.05
_START_S = 120.0
_SLOWEST_BYTES_PER_S = 50e6
_STOP_S = 10.0
_ANSWER_S = 1800.0
_PORTS = 3  # tried, as another process may take one before the server does
_BIND = "couldn't bind"
_TELLING = re.compile(r"error|fail|invalid|unable|abort|assert|not found|no such", re.IGNORECASE)
_PREFIX = re.compile(r"^[\d.]+ [A-Z] +(\w+ +)?")
_LINES = 3


@dataclass(frozen=True)
class ServerAnswer:
    """One answer, timed by the server itself.

    `n_tokens` includes the one drawn from the prompt's last row; `tokens_per_second` is without it,
    as in `Stats`. `ttft_s` is the time of the prompt. Without a drafter `n_accepted` is 0.
    """

    n_tokens: int
    tokens_per_second: float
    ttft_s: float
    n_accepted: int

    @property
    def rounds(self) -> int:
        """Passes of the target after the prompt."""
        return self.n_tokens - 1 - self.n_accepted


class LlamaServer:
    """A context: the server runs inside of it, and is always stopped at its end.

    `n_ctx` are the tokens of each of `n_slots` slots. `n_gpu_layers`: -1 for all, 0 for none on any
    GPU. `drafts_by` is its name for what drafts: with a drafter's file its kind, without one
    "draft-mtp"; "" is plain decoding. `synthetic_rates`: the chance of each of `n_draft_max` drafts
    to be accepted, as `RecordedDrafts.rates` gives them. `overrides`
    are patterns of tensors with their devices. With a `projector` it reads pictures. All else is
    the server's default, except its prompt cache in host memory, which is off.

    Raises InputError if `binary` cannot be run; BackendError, with its last words, where the
    server does not start.
    """

    def __init__(
        self,
        binary: Path,
        target: Path,
        draft: Path | None,
        *,
        n_ctx: int,
        n_gpu_layers: int,
        n_threads: int,
        n_slots: int = 1,
        n_draft_max: int = 15,
        drafts_by: str = "",
        synthetic_rates: Sequence[float] | None = None,
        flash_attn: bool = True,
        kv_type: str = "f16",
        overrides: Mapping[str, str] | None = None,
        projector: Path | None = None,
    ) -> None:
        self._binary = binary.absolute()
        layers = "all" if n_gpu_layers < 0 else str(n_gpu_layers)
        self._arguments = [
            *("-m", str(target)),
            *("-c", str(n_ctx * n_slots), "-np", str(n_slots)),
            *("-ngl", layers, "-t", str(n_threads)),
            *("-fa", "on" if flash_attn else "off", "-ctk", kv_type, "-ctv", kv_type),
            *("--fit", "off", "--cache-ram", "0", "--no-webui"),
        ]
        if n_gpu_layers == 0:
            self._arguments += ["--device", "none"]
        if overrides:
            shown = ",".join(f"{pattern}={name}" for pattern, name in overrides.items())
            self._arguments += ["-ot", shown]
        if projector is not None:
            self._arguments += ["--mmproj", str(projector), "--jinja"]
        if draft is not None:
            self._arguments += ["-md", str(draft), "--spec-draft-ngl", layers]
        if drafts_by:
            self._arguments += ["--spec-type", drafts_by, "--spec-draft-n-max", str(n_draft_max)]
        if synthetic_rates is not None:
            shown = ",".join(repr(float(rate)) for rate in synthetic_rates)
            self._arguments += ["--spec-synth-rates", shown]
        files = [path for path in (target, draft) if path is not None]
        self._limit_s = _START_S + _size(files) / _SLOWEST_BYTES_PER_S

    @property
    def command(self) -> list[str]:
        """Program and arguments, without the port."""
        return [str(self._binary), *self._arguments]

    def __enter__(self) -> LlamaServer:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="llama-server-"))
            self._log = Path(folder, "log")
            for _ in range(_PORTS):
                self._port, self._process = self._start()
                stack.callback(_stop, self._process)
                if self._wait_for_health():
                    self._running = stack.pop_all()
                    return self
                if _BIND not in self._said():
                    break
            code = self._process.returncode
            raise BackendError(f"{self._binary} ended with code {code}: {self._last_lines()}")

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def complete(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> ServerAnswer:
        """Answer one prompt of token ids, from empty caches.

        Raises BackendError if the server refuses, gives no valid answer, or dies.
        """
        body: dict[str, Any] = {
            "prompt": list(prompt_tokens),
            "n_predict": max_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "cache_prompt": False,
        }
        if seed is not None:
            body["seed"] = seed
        return _answer(self._post("/completion", body))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int) -> str:
        """The greedy answer to a conversation. Raises as `complete`."""
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        said = self._post("/v1/chat/completions", {**body, "cache_prompt": False})
        return str(said["choices"][0]["message"]["content"])

    def complete_all(
        self, prompts: Sequence[Sequence[int]], **options: Any
    ) -> tuple[list[ServerAnswer], float]:
        """Answer all prompts at once, each as `complete` does; also the seconds until the last."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            pending = [pool.submit(self.complete, prompt, **options) for prompt in prompts]
            answers = [each.result() for each in pending]
            return answers, time.perf_counter() - start

    # The process

    def _start(self) -> tuple[int, subprocess.Popen[bytes]]:
        port = _free_port()
        with self._log.open("wb") as log:
            try:
                return port, subprocess.Popen(
                    [*self.command, "--host", _HOST, "--port", str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(self._binary),
                )
            except OSError as error:
                reason = error.strerror or error
                raise InputError(f"{self._binary}: cannot be run: {reason}") from None

    def _wait_for_health(self) -> bool:
        """True when it answers, False when it has ended."""
        deadline = time.monotonic() + self._limit_s
        while self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                # Another program may listen on this port: ours must be alive.
                if self._request("GET", "/health", None, 5.0)[0] == 200:
                    return self._process.poll() is None
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{self._binary} was not ready after {self._limit_s:.0f} s: "
                    f"{self._last_lines()}"
                )
            time.sleep(_POLL_S)
        return False

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _last_lines(self) -> str:
        """The last lines of the log that name a fault, or else simply the last, in one line."""
        lines = [_PREFIX.sub("", line).strip() for line in self._said().splitlines()]
        lines = [line for line in lines if line]
        telling = [line for line in lines if _TELLING.search(line)]
        return "; ".join((telling or lines)[-_LINES:])[:500] or "it said nothing"

    # Requests

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            status, answer = self._request("POST", path, json.dumps(body), _ANSWER_S)
        except (OSError, http.client.HTTPException) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            code = self._process.returncode
            died = "" if code is None else f", it ended with code {code}: {self._last_lines()}"
            raise BackendError(f"{self._binary} gave no answer ({error}){died}") from None
        try:
            said = json.loads(answer)
        except ValueError:
            said = None
        if status != 200 or not isinstance(said, dict):
            raise BackendError(f"{self._binary} answered {status}: {_reason(said, answer)}")
        return said

    def _request(
        self, method: str, path: str, body: str | None, limit_s: float
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=limit_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _environment(binary: Path) -> dict[str, str]:
    """Ours, and the program's own folder for its libraries: builds may have been moved."""
    folder = str(binary.resolve().parent)
    name = "LD_LIBRARY_PATH"
    known = os.environ.get(name)
    return {**os.environ, name: f"{known}{os.pathsep}{folder}" if known else folder}


def _size(files: Sequence[Path]) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in files)
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        process.terminate()
        process.wait(_STOP_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _reason(said: object, answer: bytes) -> str:
    fault = said.get("error") if isinstance(said, dict) else None
    if isinstance(fault, dict) and "message" in fault:
        return str(fault["message"])
    return answer.decode("utf-8", "replace").strip()[:200] or "nothing"


def _answer(said: dict[str, Any]) -> ServerAnswer:
    try:
        timings = said["timings"]
        n_tokens, decode_s = int(timings["predicted_n"]), timings["predicted_ms"] / 1e3
        return ServerAnswer(
            n_tokens=n_tokens,
            tokens_per_second=(n_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            ttft_s=timings["prompt_ms"] / 1e3,
            n_accepted=int(timings.get("draft_n_accepted", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(
            f"llama-server answered without {error}: is it another program, or a version that is "
            "not known here?"
        ) from None
