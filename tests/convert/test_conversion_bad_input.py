"""What cannot be converted is refused in one line, and leaves no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_drafters
import shipped_drafter
import tokenizer_files
from dflash_local.convert import convert
from dflash_local.errors import FileError, InputError
from dflash_local.gguf.file import GgufFile
from hub_stand_in import Hub, running

Pair = tuple[Path, Path]

# The hub's client reads its settings when it is imported: a process for each conversion.
CHILD = """
import json, os, sys, time
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
        [sys.executable, "-c", CHILD + textwrap.dedent(code), request],
        env=os.environ | (environment or {}),
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
    """What a conversion of a hub's drafter answers."""
    home = tmp_path / "home"
    home.mkdir()

    def run(name: str, **options: Any) -> str:
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1",
        } | options.pop("environment", {})
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


def test_a_repository_that_is_not_there(fetched: Callable[..., str]) -> None:
    message = fetched("lab/nothing")
    assert message.startswith("lab/nothing: no such repository at http://127.0.0.1")
    assert "hf auth login" in message


def test_a_gated_repository_without_a_token(
    hub: Hub, fetched: Callable[..., str], drafter: Path
) -> None:
    hub.add("lab/gated", files_of(drafter), gated=True)
    assert "lab/gated: gated: accept its terms at" in fetched("lab/gated")


def test_no_network_and_nothing_cached(fetched: Callable[..., str], tmp_path: Path) -> None:
    message = fetched("lab/Tiny", environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert message.endswith("and it is not cached")
    message = fetched("lab/Tiny", environment={"HF_HUB_OFFLINE": "1"})
    assert "offline, as HF_HUB_OFFLINE asks" in message
    assert not (tmp_path / "d.gguf").exists()


@pytest.mark.slow
def test_a_hubs_drafter_is_converted_and_says_so(
    hub: Hub, fetched: Callable[..., str], drafter: Path, tmp_path: Path
) -> None:
    commit = hub.add("lab/Tiny-DFlash", files_of(drafter))
    result = json.loads(fetched("lab/Tiny-DFlash", revision="main"))
    assert (result["source"], result["revision"]) == ("lab/Tiny-DFlash", commit)
    file = GgufFile.open(tmp_path / "d.gguf")
    assert file.get("dflash_local.source.revision") == commit
    assert file.get("general.source.repo_url") == "https://huggingface.co/lab/Tiny-DFlash"


@pytest.mark.slow
def test_the_target_that_a_drafter_names_is_fetched_without_its_weights(
    hub: Hub, fetched: Callable[..., str], drafter: Path, pair: Pair, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    tokenizer_files.source(target, tokenizer_files.hf_files(GgufFile.open(pair[0])))
    commit = hub.add("lab/Tiny", files_of(target) | {"model.safetensors": b"weights"})
    card = b"---\nbase_model: lab/Tiny\n---\n"
    hub.add("lab/Tiny-DFlash", files_of(drafter) | {"README.md": card})
    assert json.loads(fetched("lab/Tiny-DFlash", target=None))["target"] == "lab/Tiny"
    assert len(hub.served("storage")) == 1  # the drafter's weights
    file = GgufFile.open(tmp_path / "d.gguf")
    assert file.get("dflash_local.target.revision") == commit
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
        (b'{"architectures": ["LlamaForCausalLMEagle3"]}', "a drafter of another kind"),
        (b'{"model_type": "bert"}', "a 'bert' model without architectures, no drafter"),
    ],
)
def test_a_config_that_is_no_drafters(
    text: bytes, expected: str, drafter: Path, pair: Pair
) -> None:
    (drafter / "config.json").write_bytes(text)
    assert expected in refusal(drafter, pair[0], FileError)


def test_truncated_weights(drafter: Path, pair: Pair) -> None:
    path = drafter / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    message = refusal(drafter, pair[0], FileError)
    assert "truncated: 1000 of " in message and "fetch the file again" in message


def test_a_header_that_lies(drafter: Path, pair: Pair) -> None:
    path = drafter / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"[512,1536]", b"[512,1535]", 1))
    message = refusal(drafter, pair[0], FileError)
    assert "model.safetensors: tensor 'fc.weight'" in message


def test_a_shard_that_is_missing(drafter: Path, pair: Pair) -> None:
    (drafter / "model.safetensors").rename(drafter / "model-00001-of-00002.safetensors")
    message = refusal(drafter, pair[0], FileError)
    assert "1 of 2 safetensors files are missing: model-00002-of-00002.safetensors" in message


def test_a_dtype_that_is_not_supported(drafter: Path, pair: Pair) -> None:
    path = drafter / "model.safetensors"
    # as wide as F32
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    message = refusal(drafter, pair[0], FileError)
    assert "dtype I32 is not supported here, expected F32, F16 or BF16" in message


def test_a_shape_that_is_not_the_configs(drafter: Path, pair: Pair) -> None:
    change_config(drafter, intermediate_size=1024)
    message = refusal(drafter, pair[0], FileError)
    assert "mlp" in message
    assert "has the shape [1536, 512], expected [1024, 512] from config.json" in message


def test_tensors_missing_and_unknown(drafter: Path, pair: Pair) -> None:
    change_config(drafter, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    message = refusal(drafter, pair[0], FileError)
    assert "11 not known: 'layers.2.input_layernorm.weight', " in message


def test_a_mask_token_outside_the_vocabulary(drafter: Path, pair: Pair) -> None:
    change_config(drafter, dflash_config={"mask_token_id": 8192, "target_layer_ids": [1, 3, 5]})
    message = refusal(drafter, pair[0], FileError)
    assert "dflash_config.mask_token_id is 8192, expected less than vocab_size, 8192" in message


@pytest.mark.parametrize("stated", [True, False])
def test_a_tapped_layer_beyond_the_target(stated: bool, drafter: Path, pair: Pair) -> None:
    """`num_target_layers` of the drafter may be right, and the target another one."""
    change_config(
        drafter,
        num_target_layers=36 if stated else None,
        dflash_config={"mask_token_id": 8191, "target_layer_ids": [1, 3, 30]},
    )
    message = refusal(drafter, pair[0], InputError if stated else FileError)
    if stated:
        assert "tapped layers [2, 4, 31]: the drafter reads the input of layer 31" in message
        assert "has the layers 0 to 7" in message
    else:
        assert "dflash_config.target_layer_ids is [1, 3, 30]" in message


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


def test_a_hidden_size_of_another_target(pair: Pair, tmp_path: Path) -> None:
    folder = hf_drafters.write(tmp_path / "drafter", "plain", n_embd=64, n_vocab=8192)
    message = refusal(folder, pair[0], FileError)
    assert "of the target: hidden_size is 512, expected the drafter's hidden_size, 64" in message


def test_another_tokenizer(drafter: Path, pair: Pair) -> None:
    """The first id that differs is named."""
    files = tokenizer_files.hf_files(GgufFile.open(pair[0]))
    path = drafter / "tokenizer.json"
    path.write_text(json.dumps(files["tokenizer.json"]))
    convert(drafter, target=pair[0], output=drafter / "d.gguf")
    vocabulary = files["tokenizer.json"]["model"]["vocab"]
    texts = {number: text for text, number in vocabulary.items()}
    vocabulary[texts[4000]], vocabulary[texts[500]] = 500, 4000
    path.write_text(json.dumps(files["tokenizer.json"]))
    message = refusal(drafter, pair[0], InputError)
    assert f"token 500 is {texts[4000]!r} in the drafter's {path}" in message
    assert f"and {texts[500]!r} in the target {pair[0]}" in message


def test_a_drafter_given_as_the_target(drafter: Path, pair: Pair) -> None:
    assert "a DFlash drafter" in refusal(drafter, pair[1], FileError)


def test_an_outtype_that_is_not_known(drafter: Path, pair: Pair) -> None:
    message = refusal(drafter, pair[0], InputError, outtype="q9")
    assert "outtype 'q9' is not known, expected one of f32, bf16" in message


def test_values_that_the_outtype_cannot_hold(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    weights = hf_drafters.weights("plain", n_embd=512, n_vocab=8192)
    weights["fc.weight"][3, 5] = 1e5
    hf_drafters.write(folder, "plain", n_embd=512, n_vocab=8192)
    stored = {name: ("F32", v.shape, v.astype("<f4").tobytes()) for name, v in weights.items()}
    hf_drafters.write_safetensors(folder / "model.safetensors", stored)
    message = refusal(folder, pair[0], InputError, outtype="f16")
    assert "tensor 'fc.weight': the largest value, 100000, does not fit F16" in message


def test_an_output_that_exists(drafter: Path, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    path.write_text("precious")
    assert "d.gguf: exists already" in refusal(drafter, pair[0], InputError, output=path)
    assert path.read_text() == "precious"
    convert(drafter, target=pair[0], output=path, force=True)
    assert GgufFile.open(path).architecture == "dflash"


def test_the_target_is_not_written_over(drafter: Path, pair: Pair, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(pair[0].read_bytes())
    message = refusal(drafter, target, InputError, output=target, force=True)
    assert "target.gguf: is the target; choose another name for the drafter" in message
    assert target.read_bytes() == pair[0].read_bytes()


def test_an_output_folder_that_is_not_there_or_read_only(
    drafter: Path, pair: Pair, tmp_path: Path
) -> None:
    message = refusal(drafter, pair[0], InputError, output=tmp_path / "nowhere" / "d.gguf")
    assert "there is no folder" in message
    message = refusal(drafter, pair[0], InputError, output=tmp_path / ("d" * 300))
    assert "cannot be written: File name too long" in message
    if sys.platform == "linux":
        # not even root may write there
        message = refusal(drafter, pair[0], InputError, output=Path("/proc/self/d.gguf"))
        assert "/proc/self/d.gguf: " in message


def test_a_disk_that_fills_up(drafter: Path, pair: Pair, tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    output = tmp_path / "output"
    output.mkdir()
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    run()
    """
    message = answer(child(code, drafter, target=pair[0], output=output / "d.gguf"))
    assert "d.gguf: cannot be written: File too large" in message
    assert os.listdir(output) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("moment", ["while it writes", "while it checks"])
def test_an_interrupt_leaves_nothing(
    moment: str, drafter: Path, pair: Pair, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    code = f"""
    def progress(done, total):
        print(done == total, flush=True)
        if done < total:
            time.sleep({0.2 if moment == "while it writes" else 0})
    run(progress=progress)
    """
    process = child(code, drafter, target=pair[0], output=output / "d.gguf")
    assert process.stdout is not None
    try:
        awaited = "False\n" if moment == "while it writes" else "True\n"
        while process.stdout.readline() != awaited:
            assert process.poll() is None
        if moment == "while it checks":
            time.sleep(0.1)
        assert len(os.listdir(output)) == 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert os.listdir(output) == []
