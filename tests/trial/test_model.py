"""A file or a build that would kill the process is found in a child, and told in one line."""

import json
import sys
from pathlib import Path

import pytest

import tiny_coder
from dflash_local.errors import BackendError, FileError
from dflash_local.fit.pairing import check_target
from dflash_local.gguf.file import GgufFile
from dflash_local.trial import child
from dflash_local.trial.model import ensure_loadable
from gguf_files import STRING, UINT32, Value, changed

TARGET, DRAFTER = tiny_coder.pair()
TAPS = (2, 4, 6)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def verdicts(cache: Path) -> list[Path]:
    return sorted((cache / "probe").glob("*"))


def without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, starting a child process fails."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")


def test_a_long_trial_is_told_to_the_caller_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "_QUIET_S", 0.05)
    said: list[str] = []
    ensure_loadable(TARGET, DRAFTER, layers=TAPS, say=said.append)
    assert said == [f"trying {TARGET.name} in a child process, once ..."]
    assert capfd.readouterr().err == ""


def test_the_shipped_pair_loads_and_the_verdict_is_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_loadable(TARGET, DRAFTER, layers=TAPS)
    assert len(verdicts(own_cache)) == 1
    without_python(monkeypatch)
    ensure_loadable(TARGET, DRAFTER, layers=TAPS)
    with pytest.raises(FileNotFoundError):
        ensure_loadable(TARGET, DRAFTER, layers=(1,))


def test_a_trial_puts_tensors_where_the_load_will(own_cache: Path) -> None:
    moved = {"overrides": {"ffn_up": "CPU"}, "tensor_split": (3.0, 1.0)}
    ensure_loadable(TARGET, None, layers=TAPS, n_gpu_layers=1, how=moved)
    ensure_loadable(TARGET, None, layers=TAPS, n_gpu_layers=1)
    assert len(verdicts(own_cache)) == 2


# each passes our own reader; the first three end in an assertion of llama.cpp
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("qwen3.expert_used_count", (4, UINT32, None), "SIGABRT.*GGML_ASSERT.*n_expert"),
        ("qwen3.rope.scaling.type", ("x", STRING, None), "SIGABRT.*GGML_ASSERT.*rope_scaling"),
        ("qwen3.rope.dimension_count", (32, UINT32, None), "make a context.*SIGABRT.*n_rot"),
        ("qwen3.attention.head_count", (5, UINT32, None), "load the model: .*wrong shape"),
        ("tokenizer.ggml.model", ("x", STRING, None), "load the vocabulary: unknown tokenizer"),
        ("tokenizer.ggml.pre", ("x", STRING, None), "unknown pre-tokenizer"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="the deaths have other names there")
def test_what_llama_cpp_cannot_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Value, reason: str
) -> None:
    path = changed(TARGET, tmp_path / "bad.gguf", keys={key: value})
    check_target(GgufFile.open(path))
    with pytest.raises(FileError, match=reason) as caught:
        ensure_loadable(path, None, layers=())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    # the bad verdict is kept as well
    without_python(monkeypatch)
    with pytest.raises(FileError, match=reason):
        ensure_loadable(path, None, layers=())


@pytest.mark.slow
def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = changed(TARGET, tmp_path / "bad.gguf", tensors=lambda t: t.pop("blk.3.attn_q.weight"))
    with pytest.raises(FileError, match=r"'blk\.3\.attn_q\.weight' not found"):
        ensure_loadable(path, None, layers=())


def test_a_tap_that_llama_cpp_does_not_offer() -> None:
    with pytest.raises(FileError, match=r"cannot tap its layers: .* layer 8; .* 1 \.\. 7"):
        ensure_loadable(TARGET, None, layers=(4, 8))


@pytest.mark.slow
def test_a_changed_file_is_tried_again(tmp_path: Path) -> None:
    good = TARGET.read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(good)
    ensure_loadable(path, None, layers=())
    changed(TARGET, path, keys={"tokenizer.ggml.pre": ("x", STRING, None)})
    with pytest.raises(FileError, match="unknown pre-tokenizer"):
        ensure_loadable(path, None, layers=())
    path.write_bytes(good)
    ensure_loadable(path, None, layers=())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"outcome": {"no": 1}}', "\0\0"])
def test_a_damaged_cache_is_ignored(own_cache: Path, damage: str) -> None:
    ensure_loadable(TARGET, None, layers=())
    (kept,) = verdicts(own_cache)
    intact = json.loads(kept.read_text())
    kept.write_text(damage)
    ensure_loadable(TARGET, None, layers=())
    assert json.loads(kept.read_text()) == intact


def test_a_cache_that_cannot_be_written_does_not_matter(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    ensure_loadable(TARGET, None, layers=())


def test_no_time_is_no_lasting_verdict(own_cache: Path) -> None:
    with pytest.raises(BackendError, match="stopped after"):
        ensure_loadable(TARGET, None, layers=(), limit_s=-1e3)
    assert not verdicts(own_cache)
    ensure_loadable(TARGET, None, layers=())


def test_another_build_of_llama_cpp_is_tried_by_itself_and_reported(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_loadable(TARGET, None, layers=())
    # a package whose import dies as one with instructions that this CPU lacks would
    other = tmp_path / "site" / "llama_cpp"
    (other / "lib").mkdir(parents=True)
    (other / "lib" / "libllama.so").write_bytes(b"")
    (other / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.syspath_prepend(str(other.parent))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    with pytest.raises(BackendError, match=r"died by SIGILL.*-DGGML_NATIVE=OFF.*pip install"):
        ensure_loadable(TARGET, None, layers=())
    assert len(verdicts(own_cache)) == 2
