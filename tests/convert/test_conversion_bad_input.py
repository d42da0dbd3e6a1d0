"""Files that cannot be converted are refused in one line, and leave no file behind."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import convert_command
import hf_drafters
import shipped_drafter
from convert_command import online, settings
from dflash_local.convert import convert
from dflash_local.errors import FileError, InputError
from dflash_local.gguf.file import GgufFile
from dflash_local.pairs.conversion import convert_for
from hub_stand_in import Hub
from ready_command import COMMAND

Pair = tuple[Path, Path]


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return shipped_drafter.write(tmp_path / "drafter")


@pytest.fixture
def fetched(hub: Hub, tmp_path: Path, pair: Pair) -> Callable[..., str]:
    """The JSON of a conversion of a hub's drafter, or its error."""
    home = tmp_path / "home"
    home.mkdir()

    def run(name: str, target: str | Path | None = pair[0], output: str = "d.gguf") -> str:
        arguments = [name, "-q", "--json", "-o", output, *(["--target", target] if target else [])]
        environment = online(hub, home) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = convert_command.run(*arguments, folder=tmp_path, environment=environment)
        assert (done.returncode == 2) == (not done.stdout), done.stderr
        return done.stdout or done.stderr.strip()

    return run


def refusal(folder: Path, target: Path, kind: type[InputError], **options: Any) -> str:
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
def test_of_the_target_that_a_drafter_names_only_a_header_is_fetched(
    hub: Hub,
    fetched: Callable[..., str],
    drafter: Path,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = "tiny-Q8_0.gguf"
    hub.add("lab/Tiny-GGUF", {file: pair[0].read_bytes()})
    card = b"---\nbase_model: lab/Tiny-GGUF\n---\n"
    source = hub.add("lab/Tiny-DFlash", files_of(drafter) | {"README.md": card})
    told = json.loads(fetched("lab/Tiny-DFlash", target=None))
    assert told["target"] == f"lab/Tiny-GGUF/{file}"
    assert told["checks"][0] == f"fits the target {file}"
    assert told["checks"][-1] == "llama.cpp takes its keys, vocabulary and tensors"
    # the drafter's weights, and the beginning of the target
    assert sum(hub.served("storage")) < sum(map(len, files_of(drafter).values())) + (3 << 20)
    written, target = GgufFile.open(tmp_path / "d.gguf"), GgufFile.open(pair[0])
    assert written.get("tokenizer.ggml.tokens") == target.get("tokenizer.ggml.tokens")
    assert written.get("dflash_local.target") == target.get("general.name")
    assert written.get("dflash_local.source.revision") == source
    assert written.get("general.source.repo_url") == "https://huggingface.co/lab/Tiny-DFlash"
    # the registry knows where the files of a model in safetensors are
    registry = tmp_path / "registry.toml"
    registry.write_text(
        '[tiny]\ndrafter = "lab/Own"\nweights = "lab/Tiny"\ngguf = "lab/Tiny-GGUF"\n'
    )
    monkeypatch.setenv("DFLASH_LOCAL_REGISTRY", str(registry))
    card = b"---\nbase_model: lab/Tiny\n---\n"
    hub.add("lab/Other-DFlash", files_of(drafter) | {"README.md": card})
    fetched("lab/Other-DFlash", target=None, output="2.gguf")
    other = GgufFile.open(tmp_path / "2.gguf")
    assert other.get("tokenizer.ggml.tokens") == target.get("tokenizer.ggml.tokens")
    hub.add("lab/Third-DFlash", files_of(drafter) | {"README.md": card.replace(b"Tiny", b"Gone")})
    message = fetched("lab/Third-DFlash", target=None, output="3.gguf")
    assert "the target of lab/Third-DFlash cannot be read: lab/Gone: no such" in message
    assert message.endswith("or a repository of the hub that has some")


@pytest.mark.slow
def test_a_mask_embedding_needs_more_than_a_header(
    hub: Hub, fetched: Callable[..., str], drafter: Path, pair: Pair
) -> None:
    vector = {"mask_token_id": 8191, "embedding": torch.zeros(512)}
    torch.save(vector, drafter / "mask_embedding.pt")
    hub.add("lab/Tiny-GGUF", {"tiny-Q8_0.gguf": pair[0].read_bytes()})
    hub.add("lab/Tiny-DFlash", files_of(drafter))
    message = fetched("lab/Tiny-DFlash", target="lab/Tiny-GGUF")
    assert "only the header of lab/Tiny-GGUF/tiny-Q8_0.gguf was read" in message


def test_of_what_is_no_drafter_no_weights_are_fetched(
    hub: Hub, fetched: Callable[..., str], drafter: Path
) -> None:
    change_config(drafter, architectures=["Qwen3ForCausalLM"])
    hub.add("lab/Model", files_of(drafter))
    assert "a Qwen3ForCausalLM model, no drafter" in fetched("lab/Model")
    assert hub.served("storage") == []


def test_a_drafter_that_names_no_target(drafter: Path) -> None:
    with pytest.raises(InputError) as caught:
        convert_for(drafter, say=print)
    message = str(caught.value)
    assert "neither the registry nor its config nor its card says which target it is" in message
    assert "give one with --target" in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "holds no config.json"),
        (b"{", "config.json: not JSON"),
        (b"[]", "config.json: holds a list, expected a JSON object"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "a LlamaForCausalLM model, no drafter"),
        # `num_target_layers` of the drafter may be right, and the target another one.
        (
            {"num_target_layers": 36}
            | {"dflash_config": {"mask_token_id": 8191, "target_layer_ids": [1, 3, 30]}},
            "target_layer_ids is [1, 3, 30], expected layers of a target that has 8; give",
        ),
        (
            {"vocab_size": 8320},
            "holds 8192 tokens, and the drafter is for a target with 8320; give",
        ),
    ],
)
def test_a_config_that_does_not_fit(
    config: bytes | dict[str, Any] | None, expected: str, drafter: Path, pair: Pair
) -> None:
    path = drafter / "config.json"
    if isinstance(config, dict):
        change_config(drafter, **config)
    elif config is None:
        path.unlink()
    else:
        path.write_bytes(config)
    assert expected in refusal(drafter, pair[0], FileError)


def test_another_tokenizer(drafter: Path, pair: Pair) -> None:
    """The first id that differs is named."""
    texts = GgufFile.open(pair[0]).require("tokenizer.ggml.tokens", list)
    vocabulary = {text: number for number, text in enumerate(texts)}
    added = [{"id": 8191, "content": "<mask>"}]
    del vocabulary[texts[8191]]
    path = drafter / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    convert(drafter, target=pair[0], dry_run=True)
    vocabulary[texts[4000]], vocabulary[texts[500]] = 500, 4000
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
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
    arguments = ["convert", drafter, "--target", pair[0], "-o", output / "d.gguf"]
    with subprocess.Popen(
        [COMMAND, *arguments], env=settings(), stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stderr is not None
        assert any(": 100 %" in line for line in iter(process.stderr.readline, ""))
        time.sleep(0.1)
        assert len(os.listdir(output)) == 1
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130
    assert os.listdir(output) == []
