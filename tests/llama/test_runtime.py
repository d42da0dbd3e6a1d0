"""The loaded llama.cpp, its devices and its log."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from dflash_local.llama import runtime
from tiny_coder import pair

PACKAGE = Path(runtime.__file__).parent.parent


def python(code: str, path: Path = PACKAGE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter of its own, modules of `path` first."""
    paths = os.pathsep.join([str(path), str(PACKAGE)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('__version__ = "0.2.90"', "found 0.2.90"),
        ("", "found one without a version"),
        ('raise RuntimeError("Failed to load shared library")', "does not load"),
        ("raise ModuleNotFoundError(name='llama_cpp')", "not installed"),
    ],
)
def test_another_llama_cpp_is_one_line_that_says_what_to_install(tmp_path, source, words):
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(source)
    done = python(
        "try:\n    import dflash_local.llama.runtime\n"
        "except ImportError as error:\n    print(error)",
        tmp_path,
    )
    assert words in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
    assert f"llama-cpp-python=={runtime.PINNED}" in done.stdout
    assert "GGML_NATIVE=OFF" in done.stdout


def test_an_extension_on_another_libllama_is_refused():
    own = ctypes.cast(llama_cpp.llama_cpp._lib.llama_decode, ctypes.c_void_p).value
    assert own is not None
    runtime.check_same_library(own)
    with pytest.raises(ImportError, match="pip install"):
        runtime.check_same_library(own + 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_listing_devices_loads_no_second_copy_of_a_library():
    code = (
        "from dflash_local.llama import runtime; runtime.devices(); "
        "print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libggml.' in l})"
    )
    assert len(python(code).stdout.split()) == 1


def test_the_cpu_is_a_device_with_the_memory_of_this_process():
    found = [device for device in runtime.devices() if device.type == "cpu"]
    assert len(found) == 1
    assert 0 < found[0].free <= found[0].total
    assert found[0].name in runtime.backends()[-1]


def test_the_build_names_the_pinned_version():
    assert f"llama-cpp-python {runtime.PINNED}" in runtime.llama_build()
    assert "CPU" in runtime.system_info()


def test_the_log_keeps_the_cause_of_a_failure_and_prints_nothing():
    code = """
import llama_cpp
from dflash_local.llama import runtime
runtime.init()
runtime.clear_log()
assert runtime.first_error_line() == ""
params = llama_cpp.llama_model_default_params()
assert not llama_cpp.llama_model_load_from_file(b"/no/such/file.gguf", params)
print(runtime.first_error_line())
"""
    quiet = python(code, DFLASH_LOCAL_LOG="")
    assert quiet.stderr == ""
    assert "/no/such/file.gguf" in quiet.stdout.splitlines()[0]
    assert "/no/such/file.gguf" in python(code, DFLASH_LOCAL_LOG="1").stderr


MODEL_LEFT_OPEN = """
import sys, llama_cpp
from dflash_local.llama import runtime
runtime.init()
class Kept:
    def __init__(self, path):
        params = llama_cpp.llama_model_default_params()
        self.free = llama_cpp.llama_model_free, llama_cpp.llama_free
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        params = llama_cpp.llama_context_default_params()
        self.context = llama_cpp.llama_init_from_model(self.model, params)
    def __del__(self):
        self.free[1](self.context)
        self.free[0](self.model)
sys.kept = Kept(PATH)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("log", ["", "1", "debug"])
def test_a_model_freed_while_python_exits_does_not_crash(log):
    done = python(f"PATH = {str(pair()[0])!r}\n{MODEL_LEFT_OPEN}", DFLASH_LOCAL_LOG=log)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    assert bool(done.stderr) == bool(log)


def test_the_log_joins_pieces_and_keeps_the_first_error():
    log = runtime._Log(echo=None)
    log.write(2, b"load", None)
    log.write(5, b"ing\nnext ", None)
    log.write(1, b"noise\n", None)
    assert log.first_error == ""
    log.write(4, b"failed \xff\n", None)
    log.write(4, b"another\n", None)
    assert log.first_error == "next failed \ufffd"
    log.clear()
    log.write(4, b"\n", None)
    log.write(5, b"third\n", None)
    assert log.first_error == "third"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("set_before", "spins"),
    [
        ({}, "'1000'"),
        ({"OMP_WAIT_POLICY": "passive"}, "'0'"),
        ({"OMP_WAIT_POLICY": "active"}, "'30000000000'"),
        ({"GOMP_SPINCOUNT": "7"}, "'7'"),
    ],
)
def test_threads_that_wait_long_sleep_unless_the_user_wants_otherwise(
    set_before: dict[str, str], spins: str
) -> None:
    if "OPENMP = 1" not in runtime.system_info():
        pytest.skip("this ggml was built without OpenMP")
    code = (
        "import os; before = dict(os.environ); import dflash_local.llama.runtime; "
        "assert dict(os.environ) == before"
    )
    unset = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} - set(set_before)
    drop = "".join(f"import os; os.environ.pop({name!r}, None); " for name in sorted(unset))
    done = python(drop + code, OMP_DISPLAY_ENV="verbose", **set_before)
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" in done.stderr:  # GNU's OpenMP; another one has no such variable
        assert f"GOMP_SPINCOUNT = {spins}" in done.stderr
