"""The `serve` command's options: refusals before anything is loaded, and effects."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import command_line
import tiny_coder
from server_process import ServerProcess, serving

TARGET, DRAFTER = map(str, tiny_coder.pair())


def refused(*arguments: str, **environment: str) -> str:
    """The one line of a refusal, before a model is loaded."""
    unset = {"DFLASH_LOCAL_TARGET": ""}
    return command_line.refused("serve", *arguments, environment=unset | environment)


REFUSED = {
    **{"65535": "--port 70000", "http": "--port http", "--parallel": "--parallel 0"},
    **{"64": "--parallel 1000", "--queue": "--queue -1", "--queue-timeout": "--queue-timeout 0"},
    **{"port": "--host 127.0.0.1:8080", "scheme": "--host http://localhost"},
    "no-such-host.invalid": "--host no-such-host.invalid",
    "192.0.2.1": "--host 192.0.2.1 --api-key k",
    "is not a host": "--allowed-host http://llm.example",
    "--allowed-host": "--allowed-host *",
    "chat.example is not an origin": "--cors-origin chat.example",
    "without a path": "--cors-origin https://chat.example/",
    "--cors-origin": "--cors-origin null",
    "--api-key": "--cors-origin *",
    "ASCII": "--api-key schlüssel",
    "no-such-file": "--api-key-file no-such-file",
    "--cache-mb": "--cache-mb -1",
    "--cache-dir": f"--cache-dir {TARGET}",
    "--target": f"--draft {DRAFTER}",
    "no-such.gguf": "--target no-such.gguf",
    "writes text: give an embedding model": f"--embedding-model {TARGET}",
    "gone.gguf": "--embedding-model gone.gguf",
    "name it with --model, too": f"--model a={TARGET} --embedding-model {TARGET}",
    "--pooling is for a server of one": f"--model a={TARGET} --pooling last",
    "--target is for a server of one": f"--model a={TARGET} --target {TARGET}",
    "--alias is for a server of one": f"--model a={TARGET} --alias b",
    "--chat-template is for a server": f"--model a={TARGET} --chat-template chatml",
    "without its target": f"--model a={TARGET} --draft {DRAFTER}",
    "two models are named 'a'": f"--model a={TARGET} --model a={TARGET}",
    **{"NAME=TARGET": "--model a", "UTF-8": f"--models {TARGET}", "soon": "--keep-alive soon"},
    "gone.toml": "--models gone.toml",
    **{"--pooling": "--pooling max", "--no-such-option": "--no-such-option", "prompt": "prompt"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_bad_options(named: str) -> None:
    assert named in refused(*REFUSED[named].split())


@pytest.mark.parametrize("name", ["--host", "--api-key", "--alias"])
def test_empty_values(name: str) -> None:
    assert name in refused(name, "")
    assert name != "--api-key" or "one word" in refused(name, "two words")


def test_an_embedding_model_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    line = refused("--embedding-model", str(broken))
    assert str(broken) in line and "writes text" not in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_other_machines_are_not_let_in_without_a_key(host: str) -> None:
    line = refused("--host", host)
    assert "--api-key" in line and "DFLASH_LOCAL_API_KEY" in line
    assert "--api-key" in refused("--host", host, DFLASH_LOCAL_API_KEY="")


@pytest.mark.parametrize("text", ["", "\n\n", "one key\n", "naïve\n"])
def test_files_that_hold_no_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(text)
    assert "key" in refused("--api-key-file", str(file))


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_file_of_keys_that_others_may_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("a-key\n")
    for mode, told in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            done = command_line.run_here("serve", "--port", port, "--api-key-file", str(file))
        assert ("chmod 600" in done.stderr) == told
        assert "a-key" not in done.stderr


@pytest.mark.parametrize(
    "typed", [["--target", TARGET, "--draft", DRAFTER], ["--model", f"pair={TARGET},{DRAFTER}"]]
)
def test_what_is_typed_takes_the_place_of_the_settings_one_model_or_several(
    tmp_path: Path, typed: list[str]
) -> None:
    line = refused(
        *("--port", "0", *typed),
        DFLASH_LOCAL_CALIBRATION_S="0",
        DFLASH_LOCAL_TARGET="other.gguf",
        DFLASH_LOCAL_DRAFT="others.gguf",
        DFLASH_LOCAL_MODEL=f"other={TARGET}",
        DFLASH_LOCAL_ALIAS="settled",
        DFLASH_LOCAL_EMBEDDING_MODEL="" if typed[0] == "--target" else "gone.gguf",
        DFLASH_LOCAL_CHAT_TEMPLATE="chatml",
    )
    assert "DFLASH_LOCAL_CALIBRATION_S is '0'; expected seconds above 0" in line


def test_a_folder_that_cannot_be_made() -> None:
    folder = f"{TARGET}/none"
    done = command_line.run_here("serve", "--port", "0", "-m", TARGET, "--cache-dir", folder)
    assert f"error: --cache-dir {folder} cannot be used" in done.stderr
    assert done.returncode == 2


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--port", str(port))
    assert str(port) in line and "--port" in line


@pytest.fixture(scope="module")
def named(cache_folder: Path) -> Iterator[ServerProcess]:
    """A server that was told everything by environment variables."""
    variables = {
        "DFLASH_LOCAL_HOST": "localhost",
        "DFLASH_LOCAL_API_KEY": "one-key another-key",
        "DFLASH_LOCAL_ALIAS": "Qwen3 8B",
        "DFLASH_LOCAL_PARALLEL": "2",
        "DFLASH_LOCAL_TARGET": TARGET,
        "DFLASH_LOCAL_CTX": "512",
        "DFLASH_LOCAL_CHAT_TEMPLATE": "llama3",
    }
    with serving(environment=variables) as running:
        yield running


@pytest.mark.slow
def test_options_may_be_environment_variables(named: ServerProcess) -> None:
    with named.client() as client:
        assert client.get("/props").status_code == 401
        for key in ("one-key", "another-key"):
            props = client.get("/props", headers={"x-api-key": key}).json()
            assert props["total_slots"] == 2
            assert props["default_generation_settings"]["n_ctx"] == 512


def test_an_alias_is_the_models_name(named: ServerProcess) -> None:
    with named.client(headers={"x-api-key": "one-key"}) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "Qwen3 8B"
        assert client.get("/v1/models/Qwen3 8B").status_code == 200
        body = {"prompt": "def f(", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).json()["model"] == "Qwen3 8B"
    assert "Qwen3 8B" in named.wait_for("^editors: ").string


def test_a_common_template_has_a_name(named: ServerProcess) -> None:
    body = {"messages": [{"role": "system", "content": "Book"}, {"role": "user", "content": "Hi"}]}
    with named.client(headers={"x-api-key": "one-key"}) as client:
        prompt = client.post("/apply-template", json=body).json()["prompt"]
    heads = [f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("system", "user")]
    assert f"{heads[0]}Book<|eot_id|>{heads[1]}Hi<|eot_id|>" in prompt
    assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_one_template_is_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("a")
    line = refused("--chat-template", "chatml", "--chat-template-file", str(file))
    assert "--chat-template and --chat-template-file" in line
    assert "chatml" in refused("--chat-template", "no-such")


def test_nothing_goes_to_stdout_and_no_key_to_stderr(named: ServerProcess) -> None:
    assert named.log
    assert not any("one-key" in line for line in named.log)


@pytest.fixture(scope="module")
def settled(
    cache_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with names, sampling and a template of its own, which shows no page, slots or
    figures, but prompts."""
    template = tmp_path_factory.mktemp("template") / "mine.jinja"
    template.write_text("{% for m in messages %}# {{ m.content }}\n{% endfor %}")
    options = "--ctx 512 --temp 1 --seed 42 --max-tokens 6 --no-page --no-slots --no-metrics"
    options += " --verbose --alias tiny,coder,code --tags small,chat"
    with serving(*options.split(), "--chat-template-file", str(template)) as running:
        yield running


@pytest.fixture
def visitor(settled: ServerProcess) -> Iterator[httpx.Client]:
    with settled.client() as client:
        yield client


def test_requests_that_do_not_say_are_sampled_as_the_command_says(visitor: httpx.Client) -> None:
    def texts(**more: object) -> list[str]:
        body = {"prompt": "def f(", "cache_prompt": False, **more}
        choices = visitor.post("/v1/completions", json=body).json()["choices"]
        return [choice["text"] for choice in choices]

    params = visitor.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["seed"], params["n_predict"]) == (1, 42, 6)
    assert texts() == texts(seed=42) != texts(seed=43)
    assert texts(temperature=0) == texts(temperature=0, seed=1)
    one, other = texts(n=2)
    assert one != other


def test_no_answer_is_longer_than_the_command_allows(visitor: httpx.Client) -> None:
    for asked, got in ((4, 4), (100, 6), (-1, 6)):
        body = {"prompt": "def f(", "n_predict": asked, "ignore_eos": True}
        answer = visitor.post("/completion", json=body).json()
        assert answer["tokens_predicted"] == answer["generation_settings"]["n_predict"] == got
        biases = answer["generation_settings"]["logit_bias"]
        assert biases and all(each["bias"] is None for each in biases)


def test_a_template_in_place_of_the_models_own(visitor: httpx.Client) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    assert visitor.post("/apply-template", json=messages).json()["prompt"] == "# Hi\n"


def test_a_model_has_the_names_and_tags_that_the_command_gives(
    settled: ServerProcess, visitor: httpx.Client
) -> None:
    (entry,) = visitor.get("/v1/models").json()["data"]
    assert entry["id"] == "code"
    assert (entry["aliases"], entry["tags"]) == (["code", "coder", "tiny"], ["chat", "small"])
    assert visitor.get("/v1/models/tiny").json() == entry
    for name in ("tiny", "stranger"):
        body = {"model": name, "prompt": "def f(", "max_tokens": 1}
        assert visitor.post("/v1/completions", json=body).json()["model"] == "code"
    settled.wait_for("a request names the model stranger")
    assert not any("the model tiny" in line for line in settled.log)


def test_chats_tell_their_prompt_where_the_command_says_so(visitor: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    told = visitor.post("/v1/chat/completions", json=body).json()
    assert told["__verbose"] == {"prompt": "# Hi\n"}
    told = visitor.post("/v1/chat/completions", json={**body, "verbose": False}).json()
    assert "__verbose" not in told


def test_what_is_not_to_be_shown(visitor: httpx.Client) -> None:
    assert visitor.get("/").status_code == 404
    for path in ("/slots", "/metrics"):
        answer = visitor.get(path)
        assert answer.status_code == 501
        assert f"--no-{path[1:]}" in answer.json()["error"]["message"]


def test_a_template_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for %}")
    done = command_line.run_here("serve", "--port", "0", "--chat-template-file", str(bad))
    assert done.returncode == 2
    assert "template cannot be read" in done.stderr.splitlines()[-1]
