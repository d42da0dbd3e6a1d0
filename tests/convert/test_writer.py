"""A file is written whole or not at all, the same every time, and in little memory."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, quants

from dflash_local.convert.key import Key
from dflash_local.convert.tensors.plan import TensorPlan
from dflash_local.convert.writer import write_gguf
from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from tensor_plans import plan_of, plans

KEYS = [Key.of("general.architecture", "dflash")]
CHILD = """
import os, resource, sys, time
from pathlib import Path
import numpy as np
from gguf import GGMLQuantizationType as Type
from dflash_local.convert.key import Key
from dflash_local.convert.tensors.plan import TensorPlan
from dflash_local.convert.writer import write_gguf
from dflash_local.errors import InputError

KEYS = [Key.of("general.architecture", "dflash")]
path = Path(sys.argv[1])
"""


def ramp(plan: TensorPlan, start: int, stop: int) -> np.ndarray:
    """Row i holds i in every place."""
    rows = np.arange(start, stop, dtype=np.float32)
    return np.repeat(rows[:, np.newaxis], plan.shape[0], axis=1)


def child(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + textwrap.dedent(code), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_shipped_drafter_is_written_again_byte_for_byte(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    shipped = GgufFile.open(pair[1])
    keys = [Key.copied(shipped, name) for name in shipped.metadata]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(pair[1]).tensors}

    def read_rows(plan: TensorPlan, start: int, stop: int) -> np.ndarray:
        tensor = tensors[plan.name]
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        return values.reshape(-1, plan.shape[0])[start:stop]

    path = tmp_path / "again.gguf"
    plan_types = [(plan_of(tensor), tensor.tensor_type) for tensor in tensors.values()]
    write_gguf(path, keys, plan_types, read_rows)
    assert path.read_bytes() == pair[1].read_bytes()


def test_tensors_come_back_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    tensors = [
        (plans("a.weight", (96, 300)), Type.F32),
        (plans("vector", (7,)), Type.F32),
        (plans("cube", (5, 3, 2)), Type.F32),
        (plans("d2t", (9,)), Type.I64),
        (plans("half.weight", (3, 5)), Type.F16),
        (plans("of several pieces.weight", (1 << 12, 1 << 10)), Type.F16),
    ]
    seen: list[tuple[int, int]] = []
    path = tmp_path / "out.gguf"
    write_gguf(path, KEYS, tensors, ramp, progress=lambda *counts: seen.append(counts))
    file = GgufFile.open(path)
    raw = path.read_bytes()
    for plan, kind in tensors:
        info = file.tensors[plan.name]
        assert (info.shape, info.type) == (plan.shape, kind)
        dtype = {Type.F32: "<f4", Type.F16: "<f2", Type.I64: "<i8"}[kind]
        stored = np.frombuffer(raw[info.offset : info.offset + info.n_bytes], dtype)
        assert np.array_equal(stored, ramp(plan, 0, plan.n_rows).ravel())
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == len(raw) - min(t.offset for t in file.tensors.values())


def test_every_kind_of_key_comes_back(tmp_path: Path) -> None:
    keys = [*KEYS]
    for kind in set(GGUFValueType) - {GGUFValueType.ARRAY}:
        values = {GGUFValueType.STRING: "a\udcff\u00e9", GGUFValueType.BOOL: True}
        value = values.get(kind, 3)
        keys.append(Key(f"x.{kind.name}", value, kind))
        keys.append(Key(f"x.{kind.name}.array", (value, value), kind))
    write_gguf(tmp_path / "out.gguf", keys, [], ramp)
    file = GgufFile.open(tmp_path / "out.gguf")
    for key in keys:
        stored = file.metadata[key.name]
        assert (tuple(stored) if isinstance(stored, list) else stored) == key.value
        assert file.value_types[key.name] == key.type_name


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    path.write_text("precious")
    with pytest.raises(InputError, match=r"out\.gguf: exists already; choose another name"):
        write_gguf(path, KEYS, [], ramp)
    assert path.read_text() == "precious"
    with pytest.raises(InputError, match="a folder, expected the name of the file"):
        write_gguf(tmp_path, KEYS, [], ramp, force=True)
    with pytest.raises(InputError, match=r"there is no folder .*nowhere; make it first"):
        write_gguf(tmp_path / "nowhere" / "out.gguf", KEYS, [], ramp)
    with pytest.raises(InputError, match="not a regular file"):
        write_gguf(Path(os.devnull), KEYS, [], ramp, force=True)
    with pytest.raises(InputError, match="cannot be written: File name too long"):
        write_gguf(tmp_path / ("d" * 300), KEYS, [], ramp)
    if sys.platform == "linux":  # not even root may write there
        with pytest.raises(InputError, match=r"/proc/self/d\.gguf: "):
            write_gguf(Path("/proc/self/d.gguf"), KEYS, [], ramp)
    write_gguf(path, KEYS, [], ramp, force=True)
    assert GgufFile.open(path).architecture == "dflash"
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_more_than_the_disk_holds_is_refused_at_once(tmp_path: Path) -> None:
    plan = plans("huge.weight", (1 << 24, 1 << 24))
    with pytest.raises(InputError, match=r"needs 1048576.0 GiB, and .* GiB left; make room"):
        write_gguf(tmp_path / "out.gguf", KEYS, [(plan, Type.F32)], ramp)
    assert os.listdir(tmp_path) == []


def test_failed_read_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    path.write_text("precious")

    def read_rows(plan: TensorPlan, start: int, stop: int) -> np.ndarray:
        if plan.name == "b":
            raise InputError("the checkpoint has gone")
        return ramp(plan, start, stop)

    tensors = [(plans("a", (64, 64)), Type.F32), (plans("b", (64, 64)), Type.F32)]
    with pytest.raises(InputError, match="the checkpoint has gone"):
        write_gguf(path, KEYS, tensors, read_rows, force=True)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_damaged_tensor_is_named(tmp_path: Path) -> None:
    def read_rows(plan: TensorPlan, start: int, stop: int) -> np.ndarray:
        return ramp(plan, start, stop) * np.float32("nan")

    tensors = [(plans("a.weight", (64, 64)), Type.Q8_0)]
    with pytest.raises(InputError, match=r"tensor 'hf\.a\.weight': 4096 values are NaN"):
        write_gguf(tmp_path / "out.gguf", KEYS, tensors, read_rows)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_write_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """The file of a running one is not."""
    code = """
    def read_rows(plan, start, stop):
        print("writing", flush=True)
        time.sleep(600)
    tensors = [(TensorPlan("t", "", (64, 64)), Type.F32)]
    write_gguf(path, KEYS, tensors, read_rows)
    """
    killed, running = (child(code, tmp_path / f"{name}.gguf") for name in ("killed", "running"))
    try:
        for process in (killed, running):
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
        killed.kill()
        killed.communicate(timeout=60)
        assert len(os.listdir(tmp_path)) == 2
        write_gguf(tmp_path / "out.gguf", KEYS, [], ramp)
        left = sorted(os.listdir(tmp_path))
        assert [name.split(".")[1] for name in left] == ["running", "gguf"]
    finally:
        for process in (killed, running):
            process.kill()
            process.communicate()


def test_write_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files, which stands for a disk that fills up after the check."""
    code = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    tensors = [(TensorPlan("t", "", (4096, 512)), Type.F32)]
    try:
        write_gguf(path, KEYS, tensors, lambda p, a, b: np.zeros((b - a, 4096), np.float32))
    except InputError as error:
        print(error)
    """
    process = child(code, tmp_path / "out.gguf")
    output, errors = process.communicate(timeout=60)
    assert errors == ""
    assert output.count("\n") == 1
    assert "out.gguf: cannot be written: File too large; 8 MiB are needed" in output
    assert os.listdir(tmp_path) == []


def test_folder_that_is_read_only_is_named(open_folder: Path) -> None:
    folder = open_folder / "fixed"
    folder.mkdir()
    folder.chmod(0o555)  # whatever the umask is
    code = """
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write anywhere
    try:
        write_gguf(path, KEYS, [], None)
    except InputError as error:
        print(error)
    """
    output, errors = child(code, folder / "out.gguf").communicate(timeout=60)
    assert errors == ""
    assert f"the folder {folder} cannot be written to; choose another" in output
