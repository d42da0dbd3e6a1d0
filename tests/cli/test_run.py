"""`run`, `pull`, `list`, `show`, `rm` and `ps` for a user with an empty cache, from the stand-in
hub."""

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import gguf_files
import hub_stand_in
import shipped_drafter
from command_line import refused, run_here
from convert_command import DRAFTER, TARGET, in_process, online, settings
from dflash_local.pairs.registry import USUAL
from hub_stand_in import Hub
from ready_command import COMMAND
from server_process import ServerProcess, until
from vision_models import write_projector, write_vision_target

NAME = "tiny"
GGUF = "lab/Tiny-GGUF"
CHECKPOINT = "lab/Tiny-DFlash"
FILE = "tiny-coder-Q8_0.gguf"
ASKED = ("--draft-width", "8", "-n", "24", "Write a function that adds two numbers.")

REGISTRY = f"""
[{NAME}]
aliases = ["tiny:coder"]
target = "Tiny-30M"
gguf = "{GGUF}"
drafter = "{CHECKPOINT}"
thinking = false
sampling = {{ temperature = 0.0, top_k = 7 }}
answer_length = 6
training_length = 512

[other]
gguf = "lab/Other-GGUF"
drafter = "lab/Other-DFlash"
"""


@dataclass
class User:
    """Someone with an empty cache, whose hub is the stand-in."""

    hub: Hub
    home: Path

    @property
    def cache(self) -> Path:
        """The hub client's."""
        return self.home / "hf" / "hub"

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command as a process of its own."""
        return in_process(*arguments, folder=self.home, environment=self.variables(environment))

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """A command that goes on in the background."""
        return subprocess.Popen(
            [COMMAND, *arguments],
            cwd=self.home,
            env=self.variables({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def done(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command that succeeds."""
        done = self.run(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done

    def refused(self, *arguments: str | Path, **environment: str) -> str:
        """The error of a command that fails for what was asked of it."""
        done = self.run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith("dflash-local: error: ") and "Traceback" not in done.stderr
        return line

    def variables(self, more: dict[str, str]) -> dict[str, str]:
        return settings(
            {
                **online(self.hub, self.home / "hf"),
                "DFLASH_LOCAL_CACHE": str(self.home / "own"),
                "DFLASH_LOCAL_REGISTRY": str(self.home / "registry.toml"),
                "DFLASH_LOCAL_TARGET": "",
                **more,
            }
        )


@cache
def checkpoint() -> tuple[tuple[str, bytes], ...]:
    """The tiny drafter as its makers would publish it: its files and their bytes."""
    with tempfile.TemporaryDirectory() as folder:
        written = shipped_drafter.write(Path(folder) / "tiny-coder-dflash")
        return tuple((path.name, path.read_bytes()) for path in written.iterdir())


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[User]:
    """A user, and a hub that holds the tiny pair: the target in GGUF, the drafter in
    safetensors."""
    with hub_stand_in.running() as hub:
        hub.add(GGUF, {FILE: TARGET.read_bytes(), "README.md": b"# Tiny\n"})
        hub.add(CHECKPOINT, dict(checkpoint()))
        (tmp_path / "registry.toml").write_text(REGISTRY)
        yield User(hub, tmp_path)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of that user, for commands in this process that need no hub."""
    (tmp_path / "registry.toml").write_text(REGISTRY)
    monkeypatch.setenv("DFLASH_LOCAL_REGISTRY", str(tmp_path / "registry.toml"))


def storage(empty: User) -> int:
    """Bytes that the hub's storage has served."""
    return sum(empty.hub.served("storage"))


@pytest.mark.slow
def test_run_fetches_converts_and_answers_then_needs_no_network(empty: User) -> None:
    first = empty.done("run", NAME, "--json", *ASKED)
    told = json.loads(first.stdout)
    assert told["stats"]["accepted"] > 0 and len(told["tokens"]) == 24
    assert f"fetching {GGUF}: {FILE}" in first.stderr
    assert f"converted {CHECKPOINT}" in first.stderr
    assert re.search(r"^context: .*\n^memory: ", first.stderr, re.MULTILINE)
    assert "measuring what drafting costs on this machine, once" in first.stderr
    assert "thinking is off" in first.stderr and "top_k 7" in first.stderr
    assert "for the last 512 tokens" in first.stderr
    # what was fetched for the conversion alone is not held twice
    assert not [path for path in empty.cache.rglob("*.safetensors")]

    asked = len(empty.hub.requests)
    again = empty.done("run", NAME, "--json", *ASKED, HF_HUB_OFFLINE="1")
    assert json.loads(again.stdout)["tokens"] == told["tokens"]
    assert json.loads(again.stdout)["stats"]["accepted"] == told["stats"]["accepted"]
    assert len(empty.hub.requests) == asked
    assert "fetching" not in again.stderr and "converted" not in again.stderr
    fetched = empty.done("run", "TINY:coder", "-q", *ASKED)
    assert fetched.stdout.strip() == told["text"].strip()
    assert len(empty.hub.requests) == asked

    words = ("run", NAME, "--json", "-q", "--draft-width", "0", ASKED[-1])
    short = json.loads(empty.done(*words, HF_HUB_OFFLINE="1").stdout)
    assert (len(short["tokens"]), short["finish_reason"]) == (6, "length")

    # `convert` knows the name, too
    words = ("convert", CHECKPOINT, "--target", NAME, "--dry-run")
    assert "would write" in empty.done(*words).stderr
    written = empty.done(*words[:-1])
    assert f"next: dflash-local chat --target {NAME} --draft " in written.stderr
    assert "--force" in empty.refused(*words[:-1])
    (empty.home / written.stdout.strip()).unlink()

    thinking = empty.done("run", NAME, "--thinking", *ASKED, HF_HUB_OFFLINE="1")
    assert "thinking is off" not in thinking.stderr

    # Python takes the name as well
    program = (
        "import dflash_local, sys\n"
        f"with dflash_local.load({NAME!r}, quiet=True, n_threads=1, draft_width=8) as model:\n"
        "    asked = [{'role': 'user', 'content': sys.argv[1]}]\n"
        "    print(model.chat(asked, max_tokens=24).text, model.drafter is not None, end='')\n"
    )
    python = subprocess.run(
        [sys.executable, "-c", program, ASKED[-1]],
        env=empty.variables({"HF_HUB_OFFLINE": "1"}),
        capture_output=True,
        encoding="utf-8",
    )
    assert (python.stdout, python.stderr) == (f"{told['text']} True", "")

    assert f"{FILE}: a target" in empty.done("inspect", NAME).stdout

    # the whole life of a pair: it is listed, shown and removed
    models = json.loads(empty.done("list", "--here", "--json").stdout)["models"]
    [here] = [model for model in models if model["name"] != USUAL]  # which lies in a package
    assert (here["name"], here["here"]) == (NAME, {"Q8_0": TARGET.stat().st_size})
    assert here["drafter_here"] and here["fits"] in ("cpu", "gpu")
    shown = json.loads(empty.done("show", NAME, "--json").stdout)
    assert shown["drafter"] == CHECKPOINT and shown["thinking"] is False
    held = {"name": "Q8_0", "n_bytes": TARGET.stat().st_size, "here": True, "fits": True}
    assert shown["quantisations"] == [{**held, "experts_in_ram": 0}]
    assert shown["drafter_bytes"] > 1e6
    assert shown["memory"] > TARGET.stat().st_size + shown["drafter_bytes"]
    assert (shown["answer_length"], shown["training_length"]) == (6, 512)
    assert "MB freed" in empty.done("rm", NAME).stderr
    assert not [path for path in empty.home.rglob("*.gguf")]
    assert "nothing of tiny is here" in empty.refused("rm", NAME)


@pytest.mark.slow
def test_a_drafter_beside_its_target_is_taken(empty: User) -> None:
    files = {f"q8/{FILE}": TARGET.read_bytes(), "dflash-Q8_0.gguf": DRAFTER.read_bytes()}
    empty.hub.add("lab/Both-GGUF", {**files, "q4/tiny-Q4_K_M.gguf": b"not fetched"})
    done = empty.done("pull", "lab/Both-GGUF:q8_0", "-q")
    target, draft = map(Path, done.stdout.splitlines())
    assert (target.name, draft.name) == (FILE, "dflash-Q8_0.gguf")
    address = f"https://huggingface.co/lab/Both-GGUF/blob/main/q8/{FILE}"
    told = json.loads(empty.done("run", address, "--json", "-q", *ASKED).stdout)
    assert told["stats"]["accepted"] > 0
    assert "Q5_K_M; it has Q4_K_M, Q8_0" in empty.refused("pull", "lab/Both-GGUF:Q5_K_M")


@pytest.mark.slow
def test_a_projector_is_fetched_on_request(empty: User, tmp_path: Path) -> None:
    target = write_vision_target(tmp_path / FILE, "qwen3vl")
    projector = write_projector(tmp_path / "mmproj-F16.gguf", target).read_bytes()
    files = {FILE: target.read_bytes(), "mmproj-BF16.gguf": b"not fetched"}
    empty.hub.add("lab/Seeing-GGUF", {**files, "mmproj-F16.gguf": projector})
    words = ("--draft", "none", "-n", "4", "Write a function.")
    asked = ("run", "lab/Seeing-GGUF", *words)
    assert "mmproj" not in empty.done(*asked).stderr
    done = empty.done(*asked, "--mmproj", "auto")
    assert "fetching lab/Seeing-GGUF: mmproj-F16.gguf" in done.stderr
    assert "images: mmproj-F16.gguf" in done.stderr
    again = empty.done(*asked, "--mmproj", "auto", HF_HUB_OFFLINE="1")
    assert "images: mmproj-F16.gguf" in again.stderr and "fetching" not in again.stderr
    assert len(list(empty.cache.rglob("mmproj*.gguf"))) == 1
    blind = empty.refused("run", GGUF, "--mmproj", "auto", *words)
    assert f"{GGUF}: holds no mmproj*.gguf" in blind
    alone = empty.refused("run", str(TARGET), "--mmproj", "auto", *words)
    assert "holds no mmproj*.gguf" in alone


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupted_transfer_is_resumed(empty: User) -> None:
    empty.hub.stalls = threading.Event()
    pulling = empty.start("pull", NAME)
    assert empty.hub.stalls.wait(60)
    until(lambda: any(path.stat().st_size for path in empty.cache.rglob("*.incomplete")))
    pulling.send_signal(signal.SIGINT)
    assert pulling.wait(60) == 130
    empty.hub.stalls = None
    before = storage(empty)
    empty.done("pull", NAME)
    weights = len(dict(checkpoint())["model.safetensors"])
    assert storage(empty) - before < TARGET.stat().st_size + weights


@pytest.mark.slow
def test_pull_fetches_what_is_newer(empty: User) -> None:
    old = empty.done("pull", NAME, "-q").stdout
    asked = storage(empty)
    assert empty.done("pull", NAME, "-q").stdout == old and storage(empty) == asked
    empty.hub.add(CHECKPOINT, {**dict(checkpoint()), "README.md": b"# Better\n"})
    assert "converted" in empty.done("pull", NAME).stderr


def test_nothing_is_fetched_that_does_not_fit(empty: User) -> None:
    line = empty.refused("run", NAME, "--ctx", "16000000", "Hello")
    assert "was not fetched" in line and "--ctx 16000000" in line
    assert storage(empty) < TARGET.stat().st_size / 2  # the header


@pytest.mark.slow
def test_what_the_hub_refuses(empty: User) -> None:
    empty.hub.repositories[GGUF].gated = True
    gated = empty.refused("run", NAME, "Hello")
    assert "accept its terms at" in gated and "hf auth login" in gated
    assert f"{GGUF}: offline" in empty.refused("run", NAME, "Hello", HF_HUB_OFFLINE="1")
    unreachable = empty.refused("pull", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in unreachable
    assert f"pull {NAME}" in empty.refused("inspect", NAME)
    assert "did you mean tiny?" in empty.refused("run", "tinny", "Hello")
    assert "lab/None" in empty.refused("run", "lab/None", "Hello")


@pytest.mark.slow
def test_a_gated_drafter_is_told_before_its_target_is_fetched(empty: User) -> None:
    empty.hub.repositories[CHECKPOINT].gated = True
    gated = empty.refused("run", NAME, "Hello")
    assert f"{CHECKPOINT}: gated: accept its terms at" in gated
    assert storage(empty) < TARGET.stat().st_size / 2  # the header
    assert not list(empty.cache.rglob("*.gguf"))


def test_a_wrong_name_is_told_whatever_the_prompt_is(registry: None) -> None:
    for prompt in ((), ("",), ("Hello",)):  # standard input is empty
        assert "did you mean tiny?" in refused("run", "tinny", *prompt)
    assert "did you mean tiny?" in refused("doctor", "tinny")
    assert "'nowhere'" in refused("serve", "--target", NAME, "--draft", "nowhere")


@pytest.mark.parametrize("url", ["nowhere", "http://", "ftp://127.0.0.1", "http://[::1"])
def test_what_is_no_address_of_a_server(url: str) -> None:
    assert url in refused("ps", "--url", url)


def test_a_server_is_asked_without_a_proxy() -> None:
    with hub_stand_in.running() as proxy:
        variables = {"http_proxy": proxy.endpoint, "no_proxy": "", "NO_PROXY": ""}
        line = refused("ps", "--url", "http://127.0.0.1:9", environment=variables)
        assert "no server answers at http://127.0.0.1:9" in line and not proxy.requests
        assert "answered 404: it is none of" in refused("ps", "--url", proxy.endpoint)


def test_a_disk_without_models_is_told(empty: User) -> None:
    file = empty.home / "registry.toml"  # in place of the one that a package of Python has here
    file.write_text(f'{REGISTRY}\n[smollm2-135m]\ngguf = "lab/Smol"\ndrafter = "lab/D"\n')
    done = empty.done("list", "--here")
    assert "pull NAME" in done.stderr and not done.stdout


def test_a_list_begins_with_advice_and_folds_further_drafters() -> None:
    def names(*arguments: str) -> list[str]:
        lines = run_here("list", *arguments).stdout.splitlines()
        assert lines[0].startswith("best for this machine: ")
        return [line.split()[0] for line in lines[3:] if line.split()]

    few, every = names(), names("--all")
    assert "qwen3-8b" in few and "qwen3-8b-dspark" not in few
    assert "qwen3-8b-dspark" in every and len(every) > len(few) + 10
    at = [i for i, name in enumerate(every) if name.startswith("gemma-4-")]
    assert at == list(range(at[0], at[0] + len(at))), "families stay together"


def test_convert_names_what_was_wrong(registry: None) -> None:
    assert f"give {CHECKPOINT}" in refused("convert", NAME)
    assert "did you mean tiny?" in refused("convert", CHECKPOINT, "--target", "tinny")
    assert f"{GGUF}: " in refused("convert", CHECKPOINT, "--target", NAME)  # not on this disk


def test_a_files_name_is_not_a_prompt(registry: None) -> None:
    for prompt in ("model.gguf", NAME, str(TARGET)):
        line = refused("chat", prompt, environment={"DFLASH_LOCAL_TARGET": ""})
        assert f"dflash-local run {prompt}" in line


@pytest.mark.slow
def test_a_server_serves_a_name(empty: User) -> None:
    variables = empty.variables({"DFLASH_LOCAL_THREADS": "1"})
    server = ServerProcess("--model", f"mine={NAME}", environment=variables)
    try:
        server.start()
        with server.client() as client:
            asked = {"model": "mine", "max_tokens": 16, "draft_width": 8}
            asked |= {"messages": [{"role": "user", "content": "Write add."}]}
            first = client.post("/v1/chat/completions", json=asked).json()
            again = client.post("/v1/chat/completions", json=asked).json()
            text = first["choices"][0]["message"]["content"]
            # greedy, as the registry advises, where the server's own default draws
            assert text and text == again["choices"][0]["message"]["content"]
            params = client.get("/props").json()["default_generation_settings"]["params"]
            assert (params["temperature"], params["top_k"]) == (0.0, 7)
        shown = empty.done("ps", "--url", server.url).stdout
        assert re.search(r"^mine:latest +", shown, re.MULTILINE)
        assert "9999" not in shown
    finally:
        server.process.terminate()
        server.wait()


@pytest.mark.slow
def test_bytes_that_are_not_the_hubs_are_not_kept(empty: User) -> None:
    empty.hub.corrupts = True
    assert "sha256" in empty.refused("pull", NAME)
    assert not [path for path in empty.cache.rglob("*.gguf")]


@pytest.mark.slow
def test_what_is_on_the_hub_is_checked_before_it_is_planned(empty: User, tmp_path: Path) -> None:
    odd: dict[str, gguf_files.Value | None] = {
        "qwen3.attention.key_length": (["a"], gguf_files.ARRAY, gguf_files.STRING)
    }
    file = gguf_files.changed(TARGET, tmp_path / "odd.gguf", keys=odd)
    empty.hub.add("lab/Odd-GGUF", {"odd-Q8_0.gguf": file.read_bytes()})
    assert "key_length' is ['a'], expected" in empty.refused("show", "lab/Odd-GGUF")
    empty.hub.add("lab/Drafter-GGUF", {"drafter-Q8_0.gguf": DRAFTER.read_bytes()})
    assert "a DFlash drafter" in empty.refused("show", "lab/Drafter-GGUF")


@pytest.mark.slow
def test_what_is_not_known_without_a_network_is_no_success(empty: User) -> None:
    done = empty.run("show", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1 and "tiny" in done.stdout.lower()
    assert "HF_ENDPOINT" in done.stdout and "list --here" in done.stdout


def test_a_model_of_ollama_is_shown_by_its_name_there(tmp_path: Path) -> None:
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:12ab"}
    manifest = tmp_path / "manifests/registry.ollama.ai/library/own/8b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/sha256-12ab").symlink_to(TARGET)
    done = run_here("show", "own:8b", "--json", environment={"OLLAMA_MODELS": str(tmp_path)})
    shown = json.loads(done.stdout)
    assert shown["takes"] == shown["quantisations"][0]["name"] == "own:8b"
    assert shown["context"] == 4096  # its own
