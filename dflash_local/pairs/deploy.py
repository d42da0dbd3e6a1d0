"""Commands and manifests that serve a pair of the registry by another engine, for many users.

What each engine takes was read from its source: vLLM 0.33.0 (`vllm/engine/arg_utils.py`, the models
with SupportsEagle3 and the drafters of `models/registry.py`), SGLang 0.5.23 (`srt/arg_groups`, the
models with `set_dflash_layers_to_capture` and the drafters' EntryClass), and the llama.cpp of
llama-cpp-python 0.3.36 (`common/arg.cpp`, the models with `t_layer_inp`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.errors import InputError

if TYPE_CHECKING:  # large packages come with it, and the command line asks for `WAYS`
    from dflash_local.pairs.entry import Entry

VLLM, SGLANG, LLAMA_SERVER = "vLLM 0.33.0", "SGLang 0.5.23", "the llama.cpp of 0.3.36"
IMAGE = "vllm/vllm-openai:v0.33.0"

_COMMON = ("qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "llama", "gpt-oss", "gemma4")
_TARGETS = {
    VLLM: {*_COMMON, "minimax-m2", "muse-glimmer", "mimo2", "deepseek2", "glm-dsa"},
    SGLANG: {*_COMMON, "muse-glimmer", "mimo2", "deepseek2", "glm-dsa", "lfm2moe"},
    LLAMA_SERVER: {*_COMMON, "minimax-m2", "muse-glimmer", "mimo2"},
}
"""The architectures whose layers each engine hands to a DFlash drafter."""

_USUAL_DRAFTS = {"dflash": 15, "dflash2": 7, "dspark": 7}
"""Drafted tokens in the examples of the drafters' makers. The drafter's `config.json` has its
`block_size`: one more for DFlash and DFlash 2, the same for DSpark."""


@dataclass(frozen=True)
class Deployment:
    """A pair to be served, and how. None: the engine's choice."""

    entry: Entry
    n_ctx: int | None = None
    n_drafts: int | None = None
    port: int = 8000

    @property
    def drafts(self) -> int:
        """The tokens that are drafted in a round."""
        if self.n_drafts:
            return self.n_drafts
        block = re.search(r"(block|-b)(\d+)(?:$|-)", self.entry.drafter)
        if block is None:
            return _USUAL_DRAFTS[self.entry.family]
        return int(block[2]) - (block[1] == "-b")  # "block7" drafts at its anchor, too

    @property
    def sampling(self) -> Mapping[str, float]:
        return self.entry.sampling_for(self.entry.thinking)


def vllm_arguments(wanted: Deployment) -> list[str]:
    """Those of `vllm serve`."""
    entry = wanted.entry
    _check(entry, VLLM)
    method = "dspark" if _is_dspark(entry) else "dflash"
    draft = {"method": method, "model": _drafter(entry), "num_speculative_tokens": wanted.drafts}
    backend = []
    if entry.architecture == "gemma4":  # its heads are too wide for FlashAttention
        draft["attention_backend"] = "FLASH_ATTN"
        backend = ["--attention-backend", "TRITON_ATTN"]
    return [
        *(_weights(entry), "--served-model-name", entry.name, "--port", str(wanted.port)),
        *("--speculative-config", json.dumps(draft)),
        *backend,
        *(["--max-model-len", str(wanted.n_ctx)] if wanted.n_ctx else []),
        *_json("--default-chat-template-kwargs", _thinking(entry)),
        *_json("--override-generation-config", _named(wanted.sampling)),
        "--trust-remote-code",
    ]


def sglang_arguments(wanted: Deployment) -> list[str]:
    """Those of `python -m sglang.launch_server`. The engine reads the drafter's block size."""
    entry = wanted.entry
    _check(entry, SGLANG)
    algorithm = "DSPARK" if _is_dspark(entry) else "DFLASH"
    window = entry.training_length if algorithm == "DFLASH" else None
    size = "--speculative-dspark-block-size"
    n = wanted.n_drafts
    if algorithm == "DFLASH" and n:
        size, n = "--speculative-dflash-block-size", n + 1
    return [
        *("--model-path", _weights(entry), "--served-model-name", entry.name),
        *("--port", str(wanted.port), "--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", _drafter(entry)),
        *([size, str(n)] if n else []),
        *(["--speculative-draft-window-size", str(window)] if window else []),
        *(["--context-length", str(wanted.n_ctx)] if wanted.n_ctx else []),
        *_json("--default-chat-template-kwargs", _thinking(entry)),
        *_json("--preferred-sampling-params", _named(wanted.sampling)),
        "--trust-remote-code",
    ]


def llama_server_arguments(wanted: Deployment) -> list[str]:
    """Those of `llama-server`, with the drafter's file as `convert` writes it."""
    entry = wanted.entry
    _check(entry, LLAMA_SERVER)
    if entry.architecture == "gpt-oss":
        raise _refused(entry, LLAMA_SERVER, "the drafter's attention has biases")
    if _drafts_at_anchor(entry):
        raise _refused(entry, LLAMA_SERVER, "the drafter drafts at its anchor, too")
    if entry.gguf is None:
        raise InputError(f"{entry.name}: the registry names no GGUF files of its target")
    flags = {"temperature": "temp", "repeat_penalty": "repeat-penalty"}
    sampling = [
        part
        for name, value in wanted.sampling.items()
        for part in (f"--{flags.get(name, name.replace('_', '-'))}", f"{value:g}")
    ]
    return [
        *("-hf", f"{entry.gguf}:{entry.quant or 'Q4_K_M'}", "--alias", entry.name),
        *("--port", str(wanted.port), "-md", _drafter_file(entry)),
        *("--spec-type", "draft-dspark" if entry.family == "dspark" else "draft-dflash"),
        *("--spec-draft-n-max", str(wanted.drafts)),
        *(["-c", str(wanted.n_ctx)] if wanted.n_ctx else []),
        *([] if entry.thinking is None else ["--reasoning", "on" if entry.thinking else "off"]),
        *sampling,
    ]


def _vllm(wanted: Deployment) -> str:
    command = _command("vllm serve", vllm_arguments(wanted))
    return f"{_fetch(wanted.entry)}# {VLLM}\n{command}"


def _sglang(wanted: Deployment) -> str:
    command = _command("python3 -m sglang.launch_server", sglang_arguments(wanted))
    return f"{_fetch(wanted.entry)}# {SGLANG}\n{command}"


def _llama_server(wanted: Deployment) -> str:
    entry = wanted.entry
    command = _command("llama-server", llama_server_arguments(wanted))
    convert = f"dflash-local convert {entry.drafter} -o {_drafter_file(entry)}\n"
    return f"# {LLAMA_SERVER}\n{'' if _is_file(entry) else convert}{command}"


def _compose(wanted: Deployment) -> str:
    return f"""\
# {VLLM}: docker compose up
services:
  {_label(wanted.entry)}:
    image: {IMAGE}
    command:
{_items(wanted, 6)}
    ports: ["{wanted.port}:{wanted.port}"]
    ipc: host
    environment: ["HF_TOKEN"]
    volumes: ["${{HOME}}/.cache/huggingface:/root/.cache/huggingface"]
    deploy:
      resources:
        reservations:
          devices: [{{driver: nvidia, count: all, capabilities: [gpu]}}]
"""


def _kubernetes(wanted: Deployment) -> str:
    name = _label(wanted.entry)
    return f"""\
# {VLLM}: kubectl apply -f FILE; the secret hf-token (key token) is for gated models
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  replicas: 1
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      containers:
        - name: vllm
          image: {IMAGE}
          args:
{_items(wanted, 12)}
          ports: [{{containerPort: {wanted.port}}}]
          env:
            - name: HF_TOKEN
              valueFrom: {{secretKeyRef: {{name: hf-token, key: token, optional: true}}}}
          resources: {{limits: {{nvidia.com/gpu: 1}}}}
          readinessProbe: {{httpGet: {{path: /health, port: {wanted.port}}}}}
          volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
      volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  selector: {{app: {name}}}
  ports: [{{port: {wanted.port}}}]
"""


WAYS: Mapping[str, Callable[[Deployment], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama-server": _llama_server,
    "docker-compose": _compose,
    "k8s": _kubernetes,
}
"""The makers of a command or a manifest. They raise InputError for a pair that the engine cannot
serve with its drafter, with the reason."""


def _check(entry: Entry, engine: str) -> None:
    """Refuse what an engine's tables of targets and drafters lack. Raises InputError."""
    if entry.architecture not in _TARGETS[engine]:
        raise _refused(entry, engine, f"it drafts for no target of kind {entry.architecture}")
    if engine == SGLANG and "-speculator." in entry.drafter:
        raise _refused(entry, engine, "it does not read drafters in the layout of `speculators`")
    if engine == SGLANG and _is_dspark(entry) and entry.architecture == "gemma4":
        raise _refused(entry, engine, "it has no Gemma4DSparkModel")
    if engine != LLAMA_SERVER and entry.weights is None:
        raise InputError(f"{entry.name}: the registry does not say where its target's weights are")
    if engine != LLAMA_SERVER and _is_file(entry):
        raise _refused(entry, engine, "it takes no drafter in GGUF")


def _refused(entry: Entry, engine: str, why: str) -> InputError:
    return InputError(f"{engine} cannot serve {entry.name} with {entry.drafter}: {why}")


def _is_file(entry: Entry) -> bool:
    return entry.drafter.endswith(".gguf")


def _is_dspark(entry: Entry) -> bool:
    """Whether engines run it as DSpark: so DeepSeek's DFlash drafters, without a Markov head."""
    return entry.family == "dspark" or _drafts_at_anchor(entry)


def _drafts_at_anchor(entry: Entry) -> bool:
    return entry.drafter.startswith("deepseek-ai/dflash_")


def _holds_both(entry: Entry) -> bool:
    """Whether a repository has the target, and the drafter in a folder `dflash` of it."""
    return entry.weights == entry.drafter


def _weights(entry: Entry) -> str:
    assert entry.weights is not None
    return entry.weights.split("/")[-1] if _holds_both(entry) else entry.weights


def _drafter_file(entry: Entry) -> str:
    return entry.drafter if _is_file(entry) else f"{entry.name}-drafter.gguf"


def _drafter(entry: Entry) -> str:
    return f"{_weights(entry)}/dflash" if _holds_both(entry) else entry.drafter


def _fetch(entry: Entry) -> str:
    get = f"hf download {entry.weights} --local-dir {_weights(entry)}\n"
    return get if _holds_both(entry) else ""


def _items(wanted: Deployment, indent: int) -> str:
    """vLLM's arguments as a YAML list: each a string in double quotes, as in JSON."""
    if _holds_both(wanted.entry):
        why = "both are in one repository, which must be fetched first"
        raise _refused(wanted.entry, VLLM, why)
    arguments = ["--model", *vllm_arguments(wanted), "--host", "0.0.0.0"]
    return "\n".join(f"{' ' * indent}- {json.dumps(each)}" for each in arguments)


def _thinking(entry: Entry) -> Mapping[str, object]:
    return {} if entry.thinking is None else {"enable_thinking": entry.thinking}


def _named(sampling: Mapping[str, float]) -> Mapping[str, float]:
    """Under the names of the hub's generation configs."""
    names = {"repeat_penalty": "repetition_penalty"}
    return {names.get(name, name): value for name, value in sampling.items()}


def _json(flag: str, value: Mapping[str, object]) -> list[str]:
    return [flag, json.dumps(value)] if value else []


def _command(program: str, arguments: list[str]) -> str:
    """One line of a shell for each option."""
    lines = [program]
    for argument in arguments:
        if argument.startswith("-") and not re.match(r"-\d", argument):
            lines.append(shlex.quote(argument))
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n    ".join(lines) + "\n"


def _label(entry: Entry) -> str:
    return re.sub(r"[^a-z0-9-]", "-", entry.name.lower())
