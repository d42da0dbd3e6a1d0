"""Set up everything that dflash-local needs, from nothing: `python3 bootstrap.py [--test]`.

Uses the active virtual environment, or else makes `.venv` beside this file. A llama-cpp-python that
works there is kept; otherwise one is built for this CPU. Then the project is installed, editable.
With nothing changed since the last time it returns at once. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
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

ROOT = Path(__file__).resolve().parent
LOG = ROOT / "build" / "setup.log"
STAMP = "dflash-local-setup.json"
OLDEST_PYTHON = (3, 10)
LLAMA_VERSION = "0.3.36"
TORCH = "torch==2.13.0"
PROBE_MODEL = ROOT / "dflash_local" / "demo" / "tiny-coder-q8_0.gguf"

# Asked of the environment's own Python: where things are, and what is installed.
QUERY = """
import importlib.metadata, importlib.util, json, pathlib, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
spec = importlib.util.find_spec("llama_cpp")
folders = list(spec.submodule_search_locations or []) if spec else []
libraries = sorted(pathlib.Path(folders[0], "lib").glob("*llama*")) if folders else []
site = pathlib.Path(sysconfig.get_path("platlib"))
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
print(json.dumps({
    "prefix": sys.prefix,
    "bin": sysconfig.get_path("scripts"),
    "python": list(sys.version_info[:2]),
    "header": header.is_file(),
    "pip": version("pip"),
    "llama": [version("llama_cpp_python"), *(f"{p}:{p.stat().st_mtime_ns}" for p in libraries)],
    "torch": version("torch"),
    "native": version("dflash-local") and any(site.glob("dflash_local/_native*")),
}))
"""

# A build for a CPU with AMX, made by GCC before 13, dies at its first quantised matrix product.
PROBE = """
import importlib.metadata, math, sys
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
if "--own-threads" in sys.argv and b"OPENMP = 1" in llama_cpp.llama_print_system_info():
    sys.exit("it computes with OpenMP's threads, which stall on a busy machine")
"""


def say(line: str) -> None:
    """Progress goes to stderr: stdout belongs to the program that is set up."""
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
        raise fail(f"the active virtual environment has no working {python}: leave it, or mend it")
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
    """A Python that is new enough: the running one, or another one found on PATH."""
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
    """A usable pip, a C++ compiler and Python's headers; CMake and Ninja pip can bring."""
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


# --- llama-cpp-python, built for this CPU ---------------------------------------------------------

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
    """What the kernel says that this CPU can do, in Linux's words; empty where it does not say."""
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


def compiles_with(flag: str) -> bool:
    command = [compiler() or "c++", flag, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    return done.returncode == 0


def ggml_flags(machine: str, features: set[str], accepts=compiles_with) -> list[str]:
    """CMake flags for llama.cpp: what this CPU has, and never AMX, which GCC before 13 miscompiles.

    `machine` and `features` are as told by `platform.machine` and `cpu_features`; `accepts` says
    whether the compiler knows a flag.
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
    """None where the pinned llama-cpp-python works; "absent"; or what is wrong with it."""
    command = [str(python), "-I", "-c", PROBE, LLAMA_VERSION, str(PROBE_MODEL), *options]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode == 0:
        return None
    if done.returncode == 3:
        return "absent"
    if done.returncode < 0:
        return f"dies with {signal.Signals(-done.returncode).name} at a quantised matrix product"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def ensure_llama(python: Path, installed: str | None) -> None:
    fault = llama_fault(python)
    if fault is None:
        return
    if installed and installed != LLAMA_VERSION:
        say(f"llama-cpp-python {installed} is replaced: {LLAMA_VERSION} is the one that fits")
    elif fault != "absent":
        say(f"the installed llama-cpp-python {LLAMA_VERSION} is broken: {fault}")
    theirs = os.environ.get("CMAKE_ARGS", "")
    # Without OpenMP ggml computes with a pool of threads of its own: as fast on a quiet machine,
    # and not many times slower on a busy one.
    own = ["-DGGML_OPENMP=OFF", "-DLLAVA_BUILD=OFF"]
    ours = [*ggml_flags(platform.machine(), cpu_features()), *own]
    # The user's flags come last, where CMake lets them win.
    env = {**os.environ, "CMAKE_ARGS": f"{shlex.join(ours)} {theirs}".strip()}
    say(f"installing llama-cpp-python {LLAMA_VERSION} with {env['CMAKE_ARGS']}")
    say("  (compiling llama.cpp takes four to five minutes on two cores; pip caches the wheel)")
    install = ["install", f"llama-cpp-python=={LLAMA_VERSION}"]
    again = [*install, "--force-reinstall", "--no-deps"]
    # pip's cache takes no account of CMAKE_ARGS: what it holds need not be what they ask for.
    uncached = ["--no-cache-dir"] if theirs else []
    first = install if fault == "absent" else again
    pip(python, [*first, *uncached], "building llama.cpp", env)
    fault = llama_fault(python, *([] if theirs else ["--own-threads"]))
    if fault and not uncached:
        say(f"pip's cached wheel of llama-cpp-python will not do ({fault}): building it anew")
        command = [str(python), "-m", "pip", "cache", "remove", f"llama_cpp_python-{LLAMA_VERSION}"]
        subprocess.run(command, capture_output=True, check=False)
        pip(python, again, "building llama.cpp", env)
        fault = llama_fault(python)
    if fault:
        hint = f"; your CMAKE_ARGS are {theirs!r}: try without" if theirs else ""
        raise fail(f"llama-cpp-python was built, but does not work here: {fault}{hint}")


# --- running pip ----------------------------------------------------------------------------------


def pip(python: Path, arguments: list[str], label: str, env: dict | None = None) -> None:
    common = ["--disable-pip-version-check", "--no-input"]
    logged([python, "-m", "pip", *arguments, *common], label, env)


def logged(command: list, label: str, env: dict | None = None) -> None:
    """Run with the output in the log and a sign of life every 20 seconds; exit where it fails."""
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
    """Changes with what makes a new installation necessary.

    Python sources are used in place, but the installation lists where each module lies.
    """
    files = [ROOT / "bootstrap.py", ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    for folder in ("cmake", "tools", "native"):
        files += sorted(p for p in (ROOT / folder).rglob("*") if p.is_file())
    digest = hashlib.sha256(str(ROOT).encode())
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    for folder in ("dflash_local", "convert", "cli"):
        for module in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{module.relative_to(ROOT)}\0".encode())
    return digest.hexdigest()


def build_requirements() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^requires = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    assert found, "pyproject.toml lists the build's requirements"
    return [r for r in ast.literal_eval(found[1]) if not r.startswith("llama-cpp-python")]


def set_up(test: bool) -> None:
    python = ensure_environment()
    state = query(python)
    stamp = Path(state["prefix"]) / STAMP
    wanted = {"fingerprint": fingerprint(), "test": test, "llama": state["llama"]}
    try:
        done = json.loads(stamp.read_text(encoding="utf-8"))
        if state["native"] and done in (wanted, {**wanted, "test": True}):
            return
    except (OSError, ValueError):
        pass
    stamp.unlink(missing_ok=True)
    ensure_tools(python, state)
    ensure_llama(python, state["llama"][0])
    if test and not (state["torch"] or "").startswith(TORCH.partition("==")[2]):
        say(f"installing {TORCH}, for the tests")
        pip(python, ["install", TORCH], TORCH)
    say("installing dflash-local and building its extension")
    pip(python, ["install", *build_requirements(), *missing_build_tools()], "build tools")
    # With matplotlib, so that `dflash-local bench --plot` works at once.
    project = f"{ROOT}[test,plot]" if test else f"{ROOT}[plot]"
    pip(python, ["install", "--no-build-isolation", "-e", project], "building dflash-local")
    wanted["llama"] = query(python)["llama"]
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    say(f"ready: {state['bin']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Set up dflash-local from nothing.")
    parser.add_argument("--test", action="store_true", help="also what the tests need")
    parser.add_argument(
        "--where", action="store_true", help="only print the folder of the commands"
    )
    options = parser.parse_args()
    if options.where:
        print(environment_python().parent.as_posix())
    else:
        set_up(options.test)


if __name__ == "__main__":
    main()
