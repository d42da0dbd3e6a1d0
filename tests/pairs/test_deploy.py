"""Commands that serve a pair by another engine: flags that it has, and refusals with a reason.

The flags are those of the engines' own parsers, kept in `tests/support/engine_flags` with where
they were read.
"""

import itertools
import json
import shlex
from pathlib import Path

import pytest
import yaml

from command_line import run_here
from dflash_local.errors import InputError
from dflash_local.pairs import registry
from dflash_local.pairs.deploy import WAYS, Deployment
from dflash_local.pairs.entry import Entry

FLAGS = Path(__file__).parents[1] / "support" / "engine_flags"
ENTRIES = registry.own_entries()
REFUSED = {"vllm": 2, "sglang": 11, "llama-server": 11, "docker-compose": 3, "k8s": 3}
"""The number of the registry's pairs that each engine's tables lack."""


def entry(name: str) -> Entry:
    found = registry.named(name)
    assert found is not None
    return found[0]


def words(text: str) -> list[str]:
    """The words of the last command of a script."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    return shlex.split(lines[-1])


@pytest.mark.parametrize("to", WAYS)
def test_every_pair_has_a_command_or_a_reason(to: str) -> None:
    refusals = []
    for each in ENTRIES:
        try:
            assert WAYS[to](Deployment(each, n_ctx=8192)).startswith(("#", "hf download "))
        except InputError as error:
            refusals.append(str(error))
            assert each.name in str(error)
    assert len(refusals) == REFUSED[to], refusals


@pytest.mark.parametrize("to", ["vllm", "sglang", "llama-server"])
def test_each_flag_is_one_of_the_engines(to: str) -> None:
    known = set((FLAGS / f"{to}.txt").read_text("utf-8").splitlines()[1:])
    for each in ENTRIES:
        try:
            command = words(WAYS[to](Deployment(each, n_ctx=8192, n_drafts=5)))
        except InputError:
            continue
        used = {word for word in command[1:] if word.startswith("-") and word != "-m"}
        assert used <= known, each.name


def test_what_vllm_is_told_of_a_drafter() -> None:
    command = words(WAYS["vllm"](Deployment(entry("gemma-4-26b-a4b"))))
    assert command[:3] == ["vllm", "serve", "google/gemma-4-26B-A4B-it"]
    assert json.loads(command[command.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": "z-lab/gemma-4-26B-A4B-it-DFlash",
        "num_speculative_tokens": 15,
        "attention_backend": "FLASH_ATTN",
    }
    assert command[command.index("--served-model-name") + 1] == "gemma-4-26b-a4b"


def test_thinking_window_and_sampling_are_those_of_the_registry() -> None:
    command = words(WAYS["sglang"](Deployment(entry("qwen3-8b"), n_ctx=4096)))
    value = dict(itertools.pairwise(command))
    assert value["--speculative-draft-window-size"] == "3072"
    assert value["--context-length"] == "4096"
    assert json.loads(value["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert json.loads(value["--preferred-sampling-params"])["temperature"] == 0.7


@pytest.mark.parametrize("to", ["docker-compose", "k8s"])
def test_manifests_are_yaml_with_the_command_of_vllm(to: str) -> None:
    documents = list(yaml.safe_load_all(WAYS[to](Deployment(entry("qwen3.6-27b")))))
    if to == "k8s":
        assert [each["kind"] for each in documents] == ["Deployment", "Service"]
        arguments = documents[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    else:
        arguments = documents[0]["services"]["qwen3-6-27b"]["command"]
    assert arguments[:2] == ["--model", "Qwen/Qwen3.6-27B"]
    config = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert config["model"] == "z-lab/Qwen3.6-27B-DFlash"


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    assert run_here("deploy", "qwen3:8b", "--to", "vllm", "-o", str(file)).returncode == 0
    assert "vllm serve Qwen/Qwen3-8B" in file.read_text("utf-8")


def test_refusals_are_one_line() -> None:
    found = run_here("deploy", "lfm2.5-24b-a2b", "--to", "vllm")
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1
    assert "cannot serve lfm2.5-24b-a2b" in found.stderr
    assert "did you mean qwen3-8b" in run_here("deploy", "qwen3-8c", "--to", "vllm").stderr
