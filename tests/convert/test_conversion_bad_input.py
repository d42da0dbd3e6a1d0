"""Files that cannot be converted are refused in one line, and leave no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_drafters
import shipped_drafter
import tokenizer_files
from convert_command import online, settings
from dflash_local.convert import convert
from dflash_local.errors import FileError, InputError
from dflash_local.gguf.file import GgufFile
from hub_stand_in import Hub, running

Pair = tuple[Path, Path]

# The hub's client reads its settings when it is imported: a process for each conversion.
CHILD = """
import json, sys
from dflash_local.convert import convert
from dflash_local.errors import InputError
arguments, options = json.loads(sys.argv[1])
def run(**more):
    try:
        print(json.dumps(convert(*arguments, **options, **more).as_dict()))
    except InputError as error:
        print(error)
"""


def child(
    code: str, *arguments: object, environment: dict[str, str] | None = None, **options: object
) -> subprocess.Popen[str]:
    request = json.dumps([arguments, options], default=str)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, request],
        env=settings(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("\n") == 1
    return output.strip()


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return shipped_drafter.write(tmp_path / "drafter")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.fixture
def fetched(hub: Hub, tmp_path: Path, pair: Pair) -> Callable[..., str]:
    """The answer of a conversion of a hub's drafter."""
    home = tmp_path / "home"
    home.mkdir()

    def run(name: str, **options: Any) -> str:
        environment = online(hub, home) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        options = {"target": pair[0], "output": tmp_path / "d.gguf"} | options
        return answer(child("run()", name, environment=environment, **options))

    return run


def refusal(folder: Path, target: Path | None, kind: type[InputError], **options: Any) -> str:
    """The one line; no file is left in the output folder, a new one."""
    output = folder.parent / "output"
    output.mkdir(exist_ok=True)
    options = {"output": output / "d.gguf"} | options
    with pytest.raises(InputError) as caught:
        convert(folder, target=target, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert os.listdir(output) == []
    return message


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_target_that_a_drafter_names_is_fetched_without_its_weights(
    hub: Hub, fetched: Callable[..., str], drafter: Path, pair: Pair, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    tokenizer_files.source(target, tokenizer_files.hf_files(GgufFile.open(pair[0])))
    commit = hub.add("lab/Tiny", files_of(target) | {"model.safetensors": b"weights"})
    card = b"---\nbase_model: lab/Tiny\n---\n"
    source = hub.add("lab/Tiny-DFlash", files_of(drafter) | {"README.md": card})
    assert json.loads(fetched("lab/Tiny-DFlash", target=None))["target"] == "lab/Tiny"
    assert len(hub.served("storage")) == 1  # the drafter's weights
    file = GgufFile.open(tmp_path / "d.gguf")
    assert file.get("dflash_local.target.revision") == commit
    assert file.get("dflash_local.source.revision") == source
    assert file.get("general.source.repo_url") == "https://huggingface.co/lab/Tiny-DFlash"
    hub.add("lab/Other-DFlash", files_of(drafter) | {"README.md": card.replace(b"Tiny", b"Gone")})
    message = fetched("lab/Other-DFlash", target=None, output=tmp_path / "2.gguf")
    assert "the target that lab/Other-DFlash names cannot be fetched: lab/Gone: no such" in message
    assert message.endswith("or give one with --target: a GGUF file, a folder or a hub id")


def test_of_what_is_no_drafter_no_weights_are_fetched(
    hub: Hub, fetched: Callable[..., str], drafter: Path
) -> None:
    change_config(drafter, architectures=["Qwen3ForCausalLM"])
    hub.add("lab/Model", files_of(drafter))
    assert "a Qwen3ForCausalLM model, no drafter" in fetched("lab/Model")
    assert hub.served("storage") == []


def test_a_drafter_that_names_no_target(drafter: Path) -> None:
    message = refusal(drafter, None, InputError)
    assert "neither its config nor its card says which target it is for" in message
    assert "give one with --target" in message


def test_a_folder_without_a_config(drafter: Path, pair: Pair) -> None:
    (drafter / "config.json").unlink()
    assert "holds no config.json" in refusal(drafter, pair[0], FileError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{", "config.json: not JSON"),
        (b"[]", "config.json: holds a list, expected a JSON object"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "a LlamaForCausalLM model, no drafter"),
    ],
)
def test_a_config_that_is_no_drafters(
    text: bytes, expected: str, drafter: Path, pair: Pair
) -> None:
    (drafter / "config.json").write_bytes(text)
    assert expected in refusal(drafter, pair[0], FileError)


def test_a_tapped_layer_beyond_the_target(drafter: Path, pair: Pair) -> None:
    """`num_target_layers` of the drafter may be right, and the target another one."""
    taps = {"mask_token_id": 8191, "target_layer_ids": [1, 3, 30]}
    change_config(drafter, num_target_layers=36, dflash_config=taps)
    message = refusal(drafter, pair[0], InputError)
    assert "tapped layers [2, 4, 31]: the drafter reads the input of layer 31" in message
    assert "has the layers 0 to 7" in message


def test_a_vocabulary_of_another_size(drafter: Path, pair: Pair, tmp_path: Path) -> None:
    files = tmp_path / "target"
    files.mkdir()
    tokenizer_files.source(files, tokenizer_files.hf_files(GgufFile.open(pair[0])))
    change_config(files, vocab_size=8200)
    message = refusal(drafter, files, InputError)
    assert "for a target with 8192 tokens, and target has 8200" in message
    change_config(drafter, vocab_size=8320)
    message = refusal(drafter, pair[0], InputError)
    assert "for a target with 8320 tokens" in message and "has 8192; give the target" in message


def test_another_tokenizer(drafter: Path, pair: Pair) -> None:
    """The first id that differs is named."""
    files = tokenizer_files.hf_files(GgufFile.open(pair[0]))
    path = drafter / "tokenizer.json"
    path.write_text(json.dumps(files["tokenizer.json"]))
    convert(drafter, target=pair[0], dry_run=True)
    vocabulary = files["tokenizer.json"]["model"]["vocab"]
    texts = {number: text for text, number in vocabulary.items()}
    vocabulary[texts[4000]], vocabulary[texts[500]] = 500, 4000
    path.write_text(json.dumps(files["tokenizer.json"]))
    message = refusal(drafter, pair[0], InputError)
    assert f"token 500 is {texts[4000]!r} in the drafter's {path}" in message
    assert f"and {texts[500]!r} in the target {pair[0]}" in message


def test_a_drafter_given_as_the_target(drafter: Path, pair: Pair) -> None:
    assert "a DFlash drafter" in refusal(drafter, pair[1], FileError)


def test_values_that_the_outtype_cannot_hold(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    weights = hf_drafters.weights("plain", n_embd=512, n_vocab=8192)
    weights["fc.weight"][3, 5] = 1e5
    hf_drafters.write(folder, "plain", n_embd=512, n_vocab=8192)
    stored = {name: ("F32", v.shape, v.astype("<f4").tobytes()) for name, v in weights.items()}
    hf_drafters.write_safetensors(folder / "model.safetensors", stored)
    message = refusal(folder, pair[0], InputError, outtype="f16")
    assert "tensor 'fc.weight': the largest value, 100000, does not fit F16" in message


def test_the_target_is_not_written_over(drafter: Path, pair: Pair, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(pair[0].read_bytes())
    message = refusal(drafter, target, InputError, output=target, force=True)
    assert "target.gguf: is the target; choose another name for the drafter" in message
    assert target.read_bytes() == pair[0].read_bytes()


def test_an_interrupt_while_it_checks_leaves_nothing(
    drafter: Path, pair: Pair, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    code = "run(progress=lambda done, total: print(done == total, flush=True))"
    process = child(code, drafter, target=pair[0], output=output / "d.gguf")
    assert process.stdout is not None
    try:
        while process.stdout.readline() != "True\n":
            assert process.poll() is None
        time.sleep(0.1)
        assert len(os.listdir(output)) == 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert os.listdir(output) == []
