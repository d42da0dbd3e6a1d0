"""Opening a GGUF of any bytes gives a checked file or one FileError that says why."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_coder
from dflash_local.errors import FileError
from dflash_local.gguf.file import GgufFile, file_key, shard_files
from gguf_files import ARRAY, BOOL, INT32, STRING, UINT32, changed, small, write

HEADER = struct.Struct("<4sIQQ")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small(tmp_path / "small.gguf")


def refusal(path: Path) -> str:
    """The one line that says why `path` is refused."""
    with pytest.raises(FileError) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def patched(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def after_name(data: bytes, name: str) -> int:
    """Position of what follows the name of a key or of a tensor: a type, or the dimensions."""
    raw = name.encode()
    return data.index(struct.pack("<Q", len(raw)) + raw) + 8 + len(raw)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", [0, 1])
def test_reads_what_the_gguf_package_reads(which: int) -> None:
    path = tiny_coder.pair()[which]
    ours, theirs = GgufFile.open(path), gguf.GGUFReader(path)
    keys = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == keys
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape)
        assert (found.type, found.type_name) == (tensor.tensor_type, tensor.tensor_type.name)
        assert (found.offset, found.n_bytes) == (tensor.data_offset, tensor.n_bytes)
    assert ours.n_bytes == path.stat().st_size


def test_values_keep_their_types(model: Path) -> None:
    file = GgufFile.open(model)
    assert file.architecture == "qwen3" and file.n_vocab == 4
    assert file.require("qwen3.block_count", int) == 2
    assert file.require("qwen3.some_flag", bool) is True
    assert file.get("qwen3.some_list") == [1, -2, 3]
    assert file.optional("qwen3.nothing", float, 0.5) == 0.5
    assert file.get("tokenizer.ggml.tokens")[3] == "é"


def test_missing_and_mistyped_keys_name_key_and_types(model: Path) -> None:
    file = GgufFile.open(model)
    with pytest.raises(FileError, match=r"'qwen3\.x' is missing, expected an integer"):
        file.require("qwen3.x", int)
    with pytest.raises(
        FileError, match=r"'qwen3\.rope\.freq_base' is float32.*expected an integer"
    ):
        file.require("qwen3.rope.freq_base", int)
    with pytest.raises(FileError, match=r"'qwen3\.some_flag' is bool.*expected an integer"):
        file.require("qwen3.some_flag", int)
    with pytest.raises(FileError, match="expected string"):
        file.optional("qwen3.block_count", str, "")


def test_not_a_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.gguf")
    assert "a folder" in refusal(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        assert "not a regular file" in refusal(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04" + b"\0" * 100, "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"GGUF\x03\0\0\0", "truncated"),
        (HEADER.pack(b"GGUF", 1, 0, 0), "version 1"),
        (HEADER.pack(b"GGUF", 4, 0, 0), "version 4"),
        (b"GGUF\0\0\0\x03" + b"\0" * 16, "big-endian"),
        (HEADER.pack(b"GGUF", 3, 1 << 60, 0), "tensors"),
        (HEADER.pack(b"GGUF", 3, 0, 1 << 60), "keys"),
        (HEADER.pack(b"GGUF", 3, 0, (1 << 64) - 1), "keys"),
    ],
)
def test_a_bad_header(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert reason in refusal(path)


def test_version_2_is_read(model: Path) -> None:
    patched(model, lambda data: data.__setitem__(slice(4, 8), struct.pack("<I", 2)))
    assert GgufFile.open(model).version == 2


def test_a_truncated_file_says_how_many_bytes_are_missing(model: Path) -> None:
    # the last tensor ends the file, but for padding
    size = max(tensor.offset + tensor.n_bytes for tensor in GgufFile.open(model).tensors.values())
    for lost in (1, 100):
        model.write_bytes(model.read_bytes()[: size - lost])
        assert f"{lost} bytes are missing" in refusal(model)


def test_no_prefix_of_a_file_opens(model: Path) -> None:
    data = model.read_bytes()
    size = max(tensor.offset + tensor.n_bytes for tensor in GgufFile.open(model).tensors.values())
    for length in range(size):
        model.write_bytes(data[:length])
        refusal(model)


@pytest.mark.parametrize(
    ("name", "at", "layout", "value", "reason"),
    [
        ("qwen3.some_list", 0, "<I", 99, "unknown value type 99"),
        ("qwen3.some_list", 4, "<I", 9, "array of arrays"),
        ("qwen3.some_list", 4, "<I", 77, "unknown element type 77"),
        ("qwen3.some_list", 8, "<Q", 1 << 62, "claims 4611686018427387904 values"),
        ("tokenizer.ggml.model", 4, "<Q", 1 << 63, "would end at byte"),
        ("token_embd.weight", 0, "<I", 0, "0 dimensions"),
        ("token_embd.weight", 0, "<I", 5, "5 dimensions"),
        ("token_embd.weight", 4, "<Q", 0, "expected positive extents"),
        ("token_embd.weight", 4, "<Q", 1 << 62, "expected positive extents"),
        ("token_embd.weight", 4, "<Q", 33, "blocks of 32"),
        ("token_embd.weight", 12, "<Q", 1 << 40, "ends at 37383395344384 and leaves the file"),
        ("token_embd.weight", 20, "<I", 4, "type number 4, known are 0 F32, 1 F16"),
        ("token_embd.weight", 20, "<i", -1, "type number -1"),
        ("token_embd.weight", 24, "<Q", 1 << 50, "leaves the file"),
        ("token_embd.weight", 24, "<Q", 7, "not aligned to 32"),
    ],
)
def test_a_bad_key_or_tensor(
    model: Path, name: str, at: int, layout: str, value: int, reason: str
) -> None:
    def damage(data: bytearray) -> None:
        struct.pack_into(layout, data, after_name(data, name) + at, value)

    message = refusal(patched(model, damage))
    assert reason in message and f"'{name}'" in message


def test_keys_must_be_text_and_differ(model: Path) -> None:
    good = model.read_bytes()
    model.write_bytes(good.replace(b"qwen3.some_flag", b"qwen3.some_list"))
    assert "'qwen3.some_list' occurs twice" in refusal(model)
    model.write_bytes(good.replace(b"qwen3.some_flag", b"qwen3.some_fl\xff\xff"))
    assert "not UTF-8" in refusal(model)


def test_tokens_need_not_be_text(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace("é".encode(), b"\xff\xfe"))
    token = GgufFile.open(model).get("tokenizer.ggml.tokens")[3]
    assert token.encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_tensors_neither_overlap_nor_leave_gaps(model: Path) -> None:
    good = model.read_bytes()
    at = after_name(good, "output_norm.weight") + 4 + 8 + 4
    (offset,) = struct.unpack_from("<Q", good, at)
    for wrong, reason in ((0, "overlaps 'token_embd.weight'"), (offset + 32, "gap|leaves")):
        data = bytearray(good + b"\0" * 64)
        struct.pack_into("<Q", data, at, wrong)
        model.write_bytes(data)
        with pytest.raises(FileError, match=reason):
            GgufFile.open(model)


def test_tensor_names_differ(tmp_path: Path) -> None:
    path = tmp_path / "twice.gguf"
    row = (np.zeros(32, np.float32), gguf.GGMLQuantizationType.F32)
    write(path, {"general.architecture": ("x", STRING, None)}, {"one": row, "two": row})
    path.write_bytes(path.read_bytes().replace(b"two", b"one"))
    assert "'one' occurs twice" in refusal(path)


@pytest.mark.parametrize("alignment", [0, 3, 7, 48, 4])
def test_alignment_is_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    keys = {"general.alignment": (64, UINT32, None)}
    path = changed(small(tmp_path / "a.gguf"), tmp_path / "b.gguf", keys=keys)
    assert GgufFile.open(path).get("general.alignment") == 64

    def damage(data: bytearray) -> None:
        struct.pack_into("<I", data, after_name(data, "general.alignment") + 4, alignment)

    assert f"general.alignment is {alignment}" in refusal(patched(path, damage))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tokenizer.ggml.tokens": (["a", "b", "a", "c"], ARRAY, STRING)}, "two ids, 0 and 2"),
        ({"tokenizer.ggml.token_type": ([1, 1], ARRAY, INT32)}, "2 values for 4 tokens"),
        ({"tokenizer.ggml.token_type": ([1] * 4, ARRAY, UINT32)}, "expected array of int32"),
        ({"tokenizer.ggml.scores": ([1] * 4, ARRAY, BOOL)}, "expected array of float32"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": ([1], ARRAY, INT32)}, "expected array of string"),
        ({"tokenizer.ggml.model": None}, "'tokenizer.ggml.model' is missing"),
        ({"tokenizer.ggml.tokens": ([1, 2], ARRAY, INT32)}, "expected array of string"),
        ({"tokenizer.ggml.model": ("gemma4", STRING, None)}, "bos_token_id"),
    ],
)
def test_vocabularies_that_llama_cpp_refuses_or_aborts_on(
    model: Path, tmp_path: Path, keys: dict[str, object], reason: str
) -> None:
    assert reason in refusal(changed(model, tmp_path / "bad.gguf", keys=keys))


def shards(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for index in range(count):
        path = folder / f"m-{index + 1:05d}-of-{count:05d}.gguf"
        row = np.full(32, index, np.float32)
        uint16 = gguf.GGUFValueType.UINT16
        keys = {
            "general.architecture": ("x", STRING, None),
            "split.no": (index, uint16, None),
            "split.count": (count, uint16, None),
            "split.tensors.count": (count, INT32, None),
        }
        paths.append(write(path, keys, {f"t{index}": (row, gguf.GGMLQuantizationType.F32)}))
    return paths


def test_shards_are_one_file(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    file = GgufFile.open(paths[0])
    assert file.shards == tuple(paths) == shard_files(paths[1])
    assert [tensor.shard for tensor in file.tensors.values()] == [0, 1, 2]
    assert file.n_bytes == sum(path.stat().st_size for path in paths)


def test_each_shard_counts_for_what_is_kept_of_a_file(tmp_path: Path) -> None:
    """Results kept under a key must not be used with another second shard."""
    paths = shards(tmp_path)
    keys = [file_key(paths[0])]
    assert keys == [file_key(paths[0])]
    for path in reversed(paths):
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        keys.append(file_key(paths[0]))
    assert len(set(map(str, keys))) == 4


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    with pytest.raises(FileError, match=f"give the first, {paths[0]}"):
        GgufFile.open(paths[1])
    paths[0].rename(tmp_path / "m.gguf")
    assert "must be named" in refusal(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").rename(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(FileError, match=r"split\.no is 2, expected 1"):
        GgufFile.open(paths[0])
    paths[1].unlink()
    assert f"1 of 3 shards are missing beside it: {paths[1].name}" in refusal(paths[0])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_bytes_escape_as_another_error(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder = tmp_path_factory.getbasetemp()
    good = folder / "good.gguf"
    if not good.exists():
        small(good)
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["byte", "word", "cut", "insert"]))
        if kind == "byte":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "word":
            words = [0, 1, 9, 0xFF, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1]
            content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(words)))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=16))
        else:
            del content[max(at, 1) :]
    path = folder / "fuzzed.gguf"
    path.write_bytes(content)
    try:
        file = GgufFile.open(path)
    except FileError:
        return
    for tensor in file.tensors.values():
        assert 0 < tensor.n_bytes <= len(content) - tensor.offset


def test_tensor_data_begin_where_llama_cpp_can_map_them(tmp_path: Path) -> None:
    good, refused = small(tmp_path / "a.gguf"), 0
    for length in range(1, 33):
        keys = {
            "general.alignment": (8, UINT32, None),
            "general.name": ("x" * length, STRING, None),
        }
        path = changed(good, tmp_path / "b.gguf", keys=keys)
        start = gguf.GGUFReader(path).tensors[0].data_offset
        if start % 32:
            assert f"begin at byte {start}" in refusal(path)
            refused += 1
        else:
            GgufFile.open(path)
    assert 0 < refused < 32
