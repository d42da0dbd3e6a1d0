"""A checkpoint reads as the safetensors package reads it, or is refused in one line."""

import hashlib
import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fuzz_safetensors
from dflash_local.convert.files.checkpoint import Checkpoint
from dflash_local.convert.files.mask_embedding import read_mask_embedding
from dflash_local.errors import FileError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "fc.weight": torch.randn(8, 24).to(torch.bfloat16),
        "layers.0.q.weight": torch.randn(16, 8),
        "layers.0.k.weight": torch.randn(4, 3, 2).to(torch.float16),
        "norm.weight": torch.randn(8).to(torch.bfloat16),
        "scale": torch.tensor(0.5),
        "d2t": torch.arange(-3, 9),
        "ids": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "mask": torch.tensor([True, False]),
    }


def sharded(folder: Path) -> Path:
    """Three shards of two or three tensors, and their index."""
    index = {}
    everything = list(tensors().items())
    for number in range(3):
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        part = dict(everything[number::3])
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return folder


def single(folder: Path) -> Path:
    save_file(tensors(), folder / SINGLE, metadata={"format": "pt"})
    return folder


def refusal(folder: Path, **options: Any) -> str:
    """The one line that says why the checkpoint is refused."""
    with pytest.raises(FileError) as caught:
        Checkpoint.open(folder, **options)
    message = str(caught.value)
    assert message.startswith(str(folder)) and "\n" not in message
    return message


def with_header(folder: Path, header: object, n_data: int) -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_data))
    return folder


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("layout", [single, sharded])
def test_reads_what_the_safetensors_package_reads(
    tmp_path: Path, layout: Callable[[Path], Path]
) -> None:
    checkpoint = Checkpoint.open(layout(tmp_path))
    assert checkpoint.tensors.keys() == tensors().keys()
    for path in checkpoint.paths:
        with safe_open(path, "pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118 - no mapping
                found, expected = checkpoint.tensors[name], theirs.get_tensor(name)
                assert found.path == path and found.shape == tuple(expected.shape)
                assert found.n_elements == expected.numel()
                assert found.n_bytes == expected.numel() * expected.element_size()
                if name in ("d2t", "ids"):
                    assert np.array_equal(checkpoint.integers(name), expected.numpy())
                elif name != "mask":
                    values = checkpoint.rows(name, 0, (found.shape or (1,))[0])
                    assert values.dtype == np.float32
                    assert np.array_equal(values, np.atleast_1d(expected.float().numpy()))


def test_rows_are_a_slice(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path))
    for name in ("fc.weight", "layers.0.q.weight", "layers.0.k.weight", "norm.weight"):
        whole = tensors()[name].float().numpy()
        for start, stop in [(0, 0), (0, 1), (1, 4), (3, len(whole)), (len(whole), len(whole))]:
            rows = checkpoint.rows(name, start, stop)
            assert rows.shape == (stop - start, *whole.shape[1:])
            assert np.array_equal(rows, whole[start:stop])
    with pytest.raises(IndexError, match="rows 3 to 9 of 8"):
        checkpoint.rows("norm.weight", 3, 9)


def test_every_bfloat16_and_float16_is_read_to_the_bit(tmp_path: Path) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    both = {"b": bits.view(torch.bfloat16), "h": bits.clone().view(torch.float16)}
    save_file(both, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    for name, values in both.items():
        found, expected = checkpoint.rows(name, 0, 1 << 16), values.float().numpy()
        assert np.array_equal(found, expected, equal_nan=True)
        # zeros keep their sign
        assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_sha256_is_that_of_the_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(sharded(tmp_path))
    names = [path.name for path in checkpoint.paths]
    assert names == sorted(names) and len(names) == 3
    together = b"".join(path.read_bytes() for path in checkpoint.paths)
    assert checkpoint.sha256() == hashlib.sha256(together).hexdigest()


def test_a_checkpoint_of_another_name_is_found(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "drafter.safetensors")
    assert Checkpoint.open(tmp_path).paths == (tmp_path / "drafter.safetensors",)
    save_file(tensors(), tmp_path / "other.safetensors")
    assert "which of drafter.safetensors, other.safetensors" in refusal(tmp_path)


GOOD = entry("F32", [2, 2], 0, 16)


@pytest.mark.parametrize(
    ("header", "n_data"),
    [
        ({"a": GOOD}, 15),
        ({"a": entry("F32", [2**32, 2**32], 0, 0)}, 0),
        ({"a": GOOD, "b": entry("U8", [8], 8, 16)}, 16),
        ({"a": GOOD, "b": entry("U8", [8], 24, 32)}, 32),
        ({"a": entry("Q4_0", [32], 0, 18)}, 18),
        ([], 0),
        (b'{"a": ' + b"9" * 5000 + b"}", 0),
        (b"[" * 100_000, 0),
        (b"\xff\xfe{\0}\0", 0),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: object, n_data: int) -> None:
    assert "no safetensors file, or a damaged one" in refusal(with_header(tmp_path, header, n_data))


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    for content, reason in [
        (b"", "no safetensors file, or a damaged one"),
        (b"GGUF\3\0\0\0" + bytes(64), "no safetensors file, or a damaged one"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "a damaged one"),
    ]:
        (tmp_path / SINGLE).write_bytes(content)
        assert reason in refusal(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    assert "a folder, expected a file" in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds no safetensors file" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle" in refusal(tmp_path)
    assert "a file, expected the folder" in refusal(tmp_path / "pytorch_model.bin")
    assert "no such folder" in refusal(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda index: index.update(weight_map={}), "holds no weight_map"),
        (
            lambda index: index["weight_map"].update(d2t="../x.safetensors"),
            "names '../x.safetensors'",
        ),
        (
            lambda index: index["weight_map"].update(x="model-00004-of-00003.safetensors"),
            "1 of 4 safetensors files are missing: model-00004-of-00003",
        ),
    ],
)
def test_a_lying_index_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    path = sharded(tmp_path) / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    assert reason in refusal(tmp_path)


def test_what_is_asked_for_must_be_there_and_fit(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path))
    with pytest.raises(FileError, match="holds no tensor 'nothing'"):
        checkpoint.rows("nothing", 0, 1)
    with pytest.raises(
        FileError, match="'mask': dtype BOOL is not supported here, expected F32, F16 or BF16"
    ):
        checkpoint.rows("mask", 0, 1)
    with pytest.raises(FileError, match="dtype F32 is not supported here, expected I64 or I32"):
        checkpoint.integers("scale")
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FileError, match="became shorter while it was read"):
        for name, found in checkpoint.tensors.items():
            if found.dtype in ("F32", "F16", "BF16"):
                checkpoint.rows(name, 0, (found.shape or (1,))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_mask_embedding_is_read_as_torch_wrote_it(tmp_path: Path, dtype: torch.dtype) -> None:
    path, vector = tmp_path / "mask_embedding.pt", torch.randn(64).to(dtype)
    for embedding in (vector, vector[8:40], torch.nn.Parameter(vector)):
        for protocol in (2, 3, 4, 5):
            torch.save(
                {"mask_token_id": 70_000, "embedding": embedding}, path, pickle_protocol=protocol
            )
            expected = embedding.detach().float().numpy()
            assert np.array_equal(read_mask_embedding(path, mask_token_id=70_000), expected)


class Runs:
    """A call that unpickling would make."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return exec, ("raise SystemExit('the pickle was executed')",)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Runs(), "would have Python import '__builtin__.exec'"),
        ({"mask_token_id": 3, "embedding": Runs()}, "would have Python import '__builtin__.exec'"),
        ({"mask_token_id": 3}, "holds something else"),
        ({"mask_token_id": "3", "embedding": torch.zeros(4)}, "holds something else"),
        ({"mask_token_id": 3, "embedding": torch.zeros(2, 2)}, "expected a vector"),
        ({"mask_token_id": 3, "embedding": torch.zeros(4, 4)[:, 0]}, "expected a vector"),
        ({"mask_token_id": 3, "embedding": torch.zeros(4).double()}, "torch.DoubleStorage"),
        ({"mask_token_id": 3, "embedding": [0.5, 0.5]}, "holds something else"),
        (OrderedDict(fc=torch.zeros(4)), "holds something else"),
    ],
)
def test_any_other_pickle_is_refused_and_never_executed(
    tmp_path: Path, value: object, reason: str
) -> None:
    path = tmp_path / "mask_embedding.pt"
    torch.save(value, path)
    with pytest.raises(FileError) as caught:
        read_mask_embedding(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and reason in message


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (b"\x80\x02}r\xff\xff\xff\xff.", "holds something else"),  # would claim 64 GiB
        (b"\x80\x02})" + b"\x85" * 4000 + b"K\x01s.", "holds something else"),
        (b"\x80\x02})" + b"\x85" * 60000 + b"K\x01s.", "larger than 4096 bytes"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "not callable"),
        (b"\x80\x02s.", "empty list"),
    ],
)
def test_a_hostile_pickle_takes_no_memory_and_no_stack(
    tmp_path: Path, pickled: bytes, reason: str
) -> None:
    path = tmp_path / "mask_embedding.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(FileError, match=reason):
        read_mask_embedding(path)


def test_a_mask_embedding_in_another_wrapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask_embedding.pt"
    value = {"mask_token_id": 3, "embedding": torch.zeros(4)}
    torch.save(value, path, _use_new_zipfile_serialization=False)
    with pytest.raises(FileError, match=r"torch's format before 1\.6"):
        read_mask_embedding(path)
    torch.save(value, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(FileError, match="compressed"):
        read_mask_embedding(path)
    with pytest.raises(FileError, match="no such file"):
        read_mask_embedding(tmp_path / "nothing.pt")


def test_damaged_files_give_clean_errors(tmp_path: Path) -> None:
    found = fuzz_safetensors.run(500, seed=0, folder=tmp_path)
    assert found.total() == 500
    # some damage does no harm, so that both ways were taken
    assert min(found[f"{kind} refused"] for kind in ("bytes", "header", "mask")) > 100
    assert found["header accepted"] and found["mask accepted"]
