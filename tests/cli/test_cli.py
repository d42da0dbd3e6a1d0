"""The `dflash-local` command as its users run it: a process, its streams, its exit code."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from command_line import parsed, refused, run, run_here
from dflash_local.cli.chat import chat
from dflash_local.cli.complete import complete
from dflash_local.cli.main import group
from dflash_local.cli.options import SAMPLING, SectionedCommand
from dflash_local.sampling.params import SamplingParams
from gguf_files import changed, spoil
from ready_command import COMMAND

# These take as long to import as all commands together, or longer.
LARGE = {
    *("dflash_local._native", "dflash_local_tune", "fastapi", "gguf", "huggingface_hub"),
    *("importlib.metadata", "jinja2", "llama_cpp", "llguidance", "numpy", "prometheus_client"),
    *("prompt_toolkit", "pydantic", "pygments", "rich", "ssl", "starlette", "tabulate", "torch"),
    *("urllib.request", "uvicorn", "wcwidth", "yaml"),
}
PROMPT = "def fib(n):"
LONG = "\n\n".join(f"def add_{n}(a, b):\n    return a + b + {n}" for n in range(20))
TARGET, DRAFTER = map(str, tiny_coder.pair())


def completion(*arguments: str, **environment: str) -> dict[str, Any]:
    """The output of `complete --json`: one object, and nothing else."""
    done = run_here("complete", "--json", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.fixture(scope="module")
def greedy() -> dict[str, Any]:
    """Drafted at full width: left to itself the controller drafts only where that pays."""
    return completion("--temp", "0", "--max-tokens", "64", "--draft-width", "16", PROMPT)


# Help, version, completion.


@pytest.mark.parametrize("command", [(), ("chat",)])
def test_both_help_options_tell_the_same(command: tuple[str, ...]) -> None:
    short, long = run_here(*command, "-h"), run_here(*command, "--help")
    assert short.returncode == 0
    assert short.stdout == long.stdout
    assert short.stdout.startswith("Usage: dflash-local")


@pytest.mark.parametrize(
    "command",
    [each for each in group.all_commands().values() if isinstance(each, SectionedCommand)],
    ids=lambda command: command.name,
)
def test_help_names_a_variable_for_every_option(command: SectionedCommand) -> None:
    asked = "--help-all" if command.usual else "-h"
    text = " ".join(run_here(str(command.name), asked).stdout.split())
    for option in (option for section in command.sections.values() for option in section):
        long = next(name for name in option.opts if name.startswith("--"))
        variable = f"DFLASH_LOCAL_{long.strip('-').replace('-', '_').upper()}"
        of_command = variable.replace("LOCAL", f"LOCAL_{str(command.name).upper()}")
        assert option.envvar in (variable, of_command)
        assert f"env var: {option.envvar}" in text


@pytest.mark.parametrize("command", ["chat", "run", "complete", "serve"])
def test_help_shows_what_people_set_and_explains_its_words(command: str) -> None:
    text = run_here(command, "-h").stdout
    usual, most = ("--port", 100) if command == "serve" else ("--temp", 80)
    assert len(text.splitlines()) < most and "env var" not in text
    assert usual in text and "--yarn-beta-fast" not in text
    assert usual == "--port" or "A round is one pass of the model" in " ".join(text.split())
    assert "--yarn-beta-fast" in run_here(command, "--help-all").stdout


def test_help_comes_without_a_command_too() -> None:
    done = run_here()
    assert (done.returncode, done.stdout) == (2, "")
    assert "complete" in done.stderr


COMPLETES = {
    "_DFLASH_LOCAL_COMPLETE": "bash_complete",
    "COMP_WORDS": "dflash-local ",
    "COMP_CWORD": "1",
}


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        ([(["--help"], {}), (["serve", "--help"], {}), (["config"], {}), ([], COMPLETES)], set()),
        ([(["ps", "--url", "http://127.0.0.1:1"], {})], {"urllib.request", "ssl"}),
    ],
    ids=["at once", "ps"],
)
def test_what_answers_at_once_imports_no_large_package(
    asked: list[tuple[list[str], dict[str, str]]], needs: set[str]
) -> None:
    code = (
        "import json, os, sys\n"
        "from dflash_local.cli.main import main\n"
        "for arguments, variables in json.loads(sys.argv[1]):\n"
        "    os.environ.update(variables)\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(json.dumps(list(sys.modules)), file=sys.__stderr__)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert "dflash_local.cli.bench" in imported
    assert imported & LARGE == needs


def test_ctrl_c_while_it_starts_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'dflash_local.cli.serve': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "(command,) = __import__('importlib.metadata').metadata.entry_points(\n"
        "    group='console_scripts', name='dflash-local'\n"
        ")\n"
        "command.load()()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_version_names_the_build_and_the_backends() -> None:
    done = run_here("--version")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(r"dflash-local \d+\.\d+\.\d+", lines[0])
    assert "llama.cpp" in lines[1]
    assert any(line.startswith("CPU") for line in lines[2:])


def test_the_shell_completes_options() -> None:
    asked = {"COMP_WORDS": "dflash-local complete --dra", "COMP_CWORD": "2"}
    done = run(environment={"_DFLASH_LOCAL_COMPLETE": "bash_complete", **asked})
    named = {"--draft", "--draft-from", "--draft-shape", "--draft-width", "--draft-window"}
    assert set(done.stdout.decode().split()) == {f"plain,{name}" for name in named}


def test_defaults_are_those_of_the_library() -> None:
    library = {field.name: field.default for field in fields(SamplingParams)}
    for command in (chat, complete):
        ours = parsed(str(command.name), ["prompt"])
        names = {option.name for option in SAMPLING} - {"logit_bias"}
        assert {ours[name] for name in names} == {None}  # the model's own come first
    told = {option.name: str(option.show_default) for option in SAMPLING}
    assert told["temperature"].endswith("else 0.8 in chats and 0 in complete")
    for name in names - {"seed", "temperature"}:
        assert told[name].endswith(f"else {library[name]:g}")


# Raw completion.


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("complete --draft-width 17 x", "this drafter's block allows at most 16"),
        ("serve --draft-width 17 --port 0", "this drafter's block allows at most 16"),
        (f"complete --target {TARGET} --draft-width 99 x", "a verify pass allows at most 64"),
        ("bench --widths 4,17 --draft-shape chain -n 4", "--draft-width is 17; this drafter's"),
    ],
)
def test_a_width_that_no_pass_has_is_refused_before_the_load(command: str, told: str) -> None:
    done = run_here(*command.split())
    assert done.returncode == 2 and told in done.stderr
    assert "context:" not in done.stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arguments", [(), ("--draft-width", "auto")], ids=str)
def test_the_width_is_left_to_the_controller(
    arguments: tuple[str, ...], greedy: dict[str, Any]
) -> None:
    drawn = completion("--temp", "0", "--max-tokens", "64", *arguments, PROMPT)
    assert drawn["tokens"] == greedy["tokens"]
    assert re.match("drafting is (on|off)", drawn["stats"]["drafting"])


def test_json_is_one_object(greedy: dict[str, Any]) -> None:
    assert set(greedy) == {"text", "tokens", "finish_reason", "seed", "stats", "exactness"}
    assert len(greedy["tokens"]) == 64 and greedy["finish_reason"] == "length"
    stats = greedy["stats"]
    assert stats["emitted"] == 64
    assert sum(stats["accepted_lengths"].values()) == stats["rounds"]
    assert stats["drafted"] > stats["accepted"] > 0
    assert greedy["exactness"]


def test_stdout_gets_the_text_and_nothing_else(greedy: dict[str, Any]) -> None:
    done = run("complete", "--max-tokens", "64", "--draft-width", "16", PROMPT)
    assert done.stdout.decode() == greedy["text"]
    assert re.search(rb"tokens/s, .*, first token after", done.stderr)


@pytest.mark.slow
def test_a_prompt_may_come_from_a_file_or_stdin(greedy: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    for arguments, stdin in [(("-f", str(file)), ""), (("-f", "-"), PROMPT), (("-",), PROMPT)]:
        done = run_here("complete", "--json", "-n", "8", *arguments, stdin=stdin.encode())
        assert json.loads(done.stdout)["tokens"] == greedy["tokens"][:8]
    done = run("complete", "--json", "-n", "8", stdin=PROMPT.encode())
    assert json.loads(done.stdout)["tokens"] == greedy["tokens"][:8]


def test_special_tokens_are_parsed(greedy: dict[str, Any]) -> None:
    marked = completion("-n", "1", PROMPT + "<|im_end|>")["stats"]["prompt_tokens"]
    assert marked == greedy["stats"]["prompt_tokens"] + 1


REFUSED = {
    "--max-tokens": ["-n 0", "-n ten"],
    "99999999999999999999": ["-n 99999999999999999999"],
    "--temp": ["--temp -1", "--temp nan", "--temp inf"],
    "--top-k": ["--top-k -1"],
    "--top-p": ["--top-p 1.5", "--top-p 0"],
    "--min-p": ["--min-p -0.5"],
    "--seed": ["--seed -1", "--seed 99999999999"],
    "--repeat-penalty": ["--repeat-penalty -2"],
    "--draft-width": ["--draft-width -1", "--compare --draft-width 0"],
    "auto": ["--draft-width wide"],
    "--ctx": ["--ctx -1"],
    "--gpu-layers": ["--gpu-layers -7"],
    "--threads": ["--threads 0", "--threads 100000000"],
    "q8_0": ["--kv-type q3"],
    "--n-cpu-moe": ["-ncmoe -1"],
    "yarn": ["--rope-scaling ntk"],
    "--rope-scale": ["--rope-scale 0"],
    "--yarn-ext-factor": ["--yarn-ext-factor nan"],
    "KEY=TYPE:VALUE": ["--override-kv qwen3.context_length=8", "--override-kv a=bool:maybe"],
    "exps is not REGEX=DEVICE": ["-ot exps"],
    "'('": ["-ot exps=CPU,(=CPU"],
    "1,-1": ["--tensor-split 1,-1"],
    "is not ID=BIAS": [f"--logit-bias {each}" for each in ("seven", "7=nan", "-7=1")],
    "no-such.gguf": ["--target no-such.gguf", f"--target {TARGET} --draft no-such.gguf"],
    "--target": [f"--draft {DRAFTER}"],
    "no-such.gbnf": ["--grammar-file no-such.gbnf"],
    "--draft": [f"--compare --target {TARGET}"],
    "--no-such-option": ["--no-such-option"],
    "unexpected extra argument": ["another"],
    "both": [f"-f {TARGET}"],
}
"""Options of `complete`, by what the error names."""
ERRORS = {
    **{f"complete {each} x": named for named, found in REFUSED.items() for each in found},
    "run nosuchmodel Hello": "`dflash-local list` has the names",
    "run qwen3-8b": "standard input is empty, so there is no prompt",
    "run qwen3-4b": "`dflash-local pull qwen3-4b` only fetches",
    "chat --json": "standard input is empty",
    "chat --chat-template-kwargs [1] hello": "is not an object",
    "chat --chat-template-kwargs { hello": "is not JSON",
    "chat -f file hello": "No such option -f",
    "chat --draft-max 8 Hello": "Did you mean --draft-width?",
    "serve --no-mmap": "Did you mean --load-mode none?",
    f"serve -m {TARGET} --flash-attn on": "(on): switches take no value",
    f"serve -m {TARGET} smollm2-135m": "argument (smollm2-135m) (see",
    "serve smollm2-135m": "a model is named by --target smollm2-135m",
    "serve -fa on": "-f. If it is of -fa: flash attention is on by default",
    f"show {DRAFTER}": "a DFlash drafter (general.architecture 'dflash') given as the target",
    "serve --jinja": "--jinja. It is always on here: leave it out",
    "serve --host nota.host.invalid": "is no address of this machine",
    "config --edit": "needs a terminal",
    f"bench --draft {DRAFTER}": "without its target",
    "bench --target no.gguf": "no such file",
    "bench qwen3-8b": "a model is named by --target qwen3-8b",
    "bench --widths 1": "not a list of whole numbers",
    "bench --draft-shape chain,bush": "not a list of some of chain, tree, auto",
    "bench --depths 1x": "not a list of whole numbers",
    "bench --temps 0,warm": "not a number",
    "bench -q --lora no.gguf:0.5": "no.gguf: no such file",
    f"bench -q --lora {DRAFTER}": "no LoRA adapter",
    "bench -q --lora a.gguf:nan": "scale of the adapter a.gguf is nan",
    f"bench -q --control-vector {DRAFTER}": "expected direction.LAYER",
    "bench --category prose": "not one of the built-in prompts",
    "bench --category fim --dataset gsm8k": "exclude each other",
    f"calibrate --target {TARGET}": "--draft",
    f"calibrate --draft {DRAFTER}": "--target",
    f"calibrate --target no-such.gguf --draft {DRAFTER}": "no-such.gguf",
    "calibrate --threads 0": "--threads",
    "calibrate --draft-width 8": "--draft-width",
    "serve-me": "serve-me",
}


@pytest.mark.parametrize("command", ERRORS)
def test_an_error_names_its_cause_and_the_next_step(command: str) -> None:
    unset = dict.fromkeys(("EDITOR", "VISUAL", "DFLASH_LOCAL_TARGET"), "")
    assert ERRORS[command] in refused(*command.split(), environment=unset)


def test_numbers_as_llama_server_has_them() -> None:
    for given, value in {"0": None, "512": 512}.items():
        assert parsed("serve", ["-c", given])["n_ctx"] == value
    for given, value in {"-1": None, "auto": None, "all": -1, "99": 99}.items():
        assert parsed("serve", ["-ngl", given])["n_gpu_layers"] == value


def test_a_bad_file_has_its_error_alone(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x03\0\0\0" + b"\x01" + b"\0" * 15 + b"\xff" * 40)
    told = refused("chat", "--target", str(bad), "Hello")
    assert "header is damaged" in told


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has none")
def test_a_full_disk_is_named() -> None:
    done = subprocess.run(f"'{COMMAND}' list > /dev/full", shell=True, capture_output=True)
    assert b"standard output: No space left" in done.stderr and done.returncode == 2


def test_llama_server_s_names_of_options_are_known(greedy: dict[str, Any]) -> None:
    files = ("-m", TARGET, "-md", DRAFTER, "-c", "1024", "-ngl", "0", "-t", "1")
    cache = ("-ctk", "q8_0", "-ctv", "f16", "-b", "256", "-ub", "128", "-s", "3")
    done = run_here("complete", *files, *cache, "--n-predict", "8", "--json", PROMPT)
    assert json.loads(done.stdout)["tokens"] == greedy["tokens"][:8]
    assert "1024 tokens, q8_0 and f16 KV cache" in done.stderr


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options",
    [
        *(f"--load-mode {mode} -dev none" for mode in ("none", "mlock", "mmap+mlock")),
        r"-cmoe -ncmoe 3 --override-tensor blk\.\d{1,2}\.attn=CPU,ffn=CPU",
    ],
)
def test_where_the_weights_lie_changes_no_token(options: str, greedy: dict[str, Any]) -> None:
    assert completion(*options.split(), "-n", "8", PROMPT)["tokens"] == greedy["tokens"][:8]


@pytest.mark.slow
def test_positions_may_be_stretched(greedy: dict[str, Any]) -> None:
    """As llama.cpp does by the keys of the file; the drafts stay the answer's own."""
    keys = {"rope.scaling.type": "str:linear", "rope.scaling.factor": "float:16"}
    by_keys = ",".join(f"qwen3.{key}={value}" for key, value in keys.items())
    linear = ("--rope-scaling", "linear", "--rope-scale", "16", "--ctx", "8192")
    yarn = ("--rope-scaling", "yarn", "--rope-scale", "16", "--yarn-orig-ctx", "64")
    tokens = {}
    for name, options in {
        **{"plain": (), "options": linear, "drafted": (*linear, "--draft-width", "8")},
        **{"yarn": yarn, "keys": ("--override-kv", by_keys, "--ctx", "8192")},
        **{"base": ("--rope-freq-base", "500")},
    }.items():
        done = run_here("complete", "--kv-type", "q8_0", *options, "-n", "24", "--json", LONG)
        tokens[name] = json.loads(done.stdout)["tokens"]
        assert ("trained on 4096 tokens, fewer than 8192" in done.stderr) == ("8192" in options)
    assert tokens["options"] == tokens["keys"] == tokens["drafted"]
    assert len(set(map(tuple, tokens.values()))) == 4


def test_devices_are_listed_without_a_model() -> None:
    done = run_here("chat", "--list-devices")
    assert done.returncode == 0 and done.stdout.startswith("CPU: ")


def test_other_keys_of_a_file_are_planned_with() -> None:
    done = run_here("complete", "--override-kv", "qwen3.context_length=int:512", "-n", "1", PROMPT)
    assert "context: 512 tokens" in done.stderr


def test_a_device_that_is_not_there_is_named() -> None:
    done = run_here("complete", "-ot", "exps=TPU", PROMPT)
    told = "error: --override-tensor names the device 'TPU'; expected one of CPU\n"
    assert told in done.stderr and done.returncode == 2


@pytest.mark.parametrize("more", ["", "--draft copies", "--draft none", "--draft-width 0"])
def test_without_a_drafter(greedy: dict[str, Any], more: str) -> None:
    done = run_here("complete", "--json", "--target", TARGET, *more.split(), "-n", "16", PROMPT)
    answer = json.loads(done.stdout)
    assert ("without a drafter" in done.stderr) == ("copies" not in more)
    assert answer["tokens"] == greedy["tokens"][:16]
    stats = answer["stats"]
    assert stats["copied"] == stats["drafted"]
    if "0" in more:
        assert stats["drafted"] == 0 and answer["exactness"] is None


def test_options_may_be_environment_variables(greedy: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"  # for calls without a prompt of their own
    file.write_text("another prompt")
    variables = {"MAX_TOKENS": "4", "DRAFT_WIDTH": "2", "FILE": str(file)}
    given = {f"DFLASH_LOCAL_{name}": value for name, value in variables.items()}
    answer = completion(PROMPT, **given)
    assert answer["tokens"] == greedy["tokens"][:4]
    assert answer["stats"]["drafted"] <= answer["stats"]["rounds"]

    line = greedy["text"].index("\n")
    answer = completion(PROMPT, "-n", "64", DFLASH_LOCAL_STOP="\n")
    assert (answer["text"], answer["finish_reason"]) == (greedy["text"][:line], "stop")


def test_a_seed_repeats_an_answer() -> None:
    # On the CPU, where this pair's rows are the same in batches and alone.
    asked = ("--temp", "0.8", "-n", "32", "--gpu-layers", "0", PROMPT)
    ways = (("--seed", "7"), ("--seed", "7", "--draft-width", "0"), ("--seed", "8"))
    drawn = [completion(*asked, *way)["tokens"] for way in ways]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_banned_token_stays_away(greedy: dict[str, Any]) -> None:
    first = greedy["tokens"][0]
    answer = completion("-n", "16", "--logit-bias", f"{first}=-inf", PROMPT)
    assert first not in answer["tokens"]


def test_a_grammar_is_followed(tmp_path: Path) -> None:
    grammar = tmp_path / "digits.gbnf"
    grammar.write_text("root ::= [0-9] [0-9] [0-9]")
    answer = completion("-n", "16", "--grammar-file", str(grammar), PROMPT)
    assert re.fullmatch("[0-9]{3}", answer["text"])
    assert answer["finish_reason"] == "stop"


def test_a_comparison_with_plain_decoding(greedy: dict[str, Any]) -> None:
    done = run_here("complete", "--json", "--compare", "--temp", "0.8", "-n", "16", PROMPT)
    compared = json.loads(done.stdout)["compare"]
    assert compared["equal"] and compared["ratio"] > 0 and compared["chain"] is None
    assert "the same tokens" in done.stderr


# Ends before the end.


def begun(*options: str) -> subprocess.Popen[bytes]:
    """A long answer, of which the first characters have come."""
    command = [COMMAND, "complete", "-n", "2000", *options, PROMPT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(4)
    return process


def test_ctrl_c_keeps_what_came_so_far() -> None:
    with begun() as process:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"stopped" in stderr and b"Traceback" not in stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    with begun("-q") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="closes streams as a POSIX shell does")
@pytest.mark.parametrize("closed", ["1", "2"])
def test_closed_streams_mix_nothing_up(closed: str, greedy: dict[str, Any]) -> None:
    script = f'exec "$0" complete -n 64 "$1" {closed}>&-'
    done = subprocess.run(["sh", "-c", script, COMMAND, PROMPT], capture_output=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout.decode() == ("" if closed == "1" else greedy["text"])
    assert b"Traceback" not in done.stderr


# Bad input: exit code 2, one line, nothing on stdout.


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [(), ("--temp", "0.8"), ("--draft", "none")])
def test_a_target_that_computes_no_numbers(tmp_path: Path, options: tuple[str, ...]) -> None:
    bad = changed(TARGET, tmp_path / "bad.gguf", tensors=spoil)
    line = refused("complete", "--target", str(bad), "--gpu-layers", "0", "-q", *options, PROMPT)
    assert "not finite numbers; the model file is damaged" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(([""], "empty"), ([], "empty"), (["-"], "empty"), (["--stop", "", PROMPT], "--stop")),
        *((["-f", "no-such-file"], "no-such-file"), (["-f", TARGET], "UTF-8")),
        (["-f", "/dev/zero"], "device"),
    ],
)
def test_bad_prompts(arguments: list[str], named: str) -> None:
    assert named in refused("complete", *arguments)


def test_bad_environment_variables_are_named() -> None:
    variables = {"DFLASH_LOCAL_MAX_TOKENS": "-5"}
    assert "DFLASH_LOCAL_MAX_TOKENS" in refused("complete", PROMPT, environment=variables)


def test_prompts_that_are_not_text() -> None:
    assert "UTF-8" in refused("complete", stdin=b"caf\xe9")
    if sys.platform == "linux":
        word = os.fsdecode(b"caf\xe9")
        assert "UTF-8" in refused("complete", word)
        assert "UTF-8" in refused("complete", "--stop", word, PROMPT)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="its command lines are Unicode")
def test_a_prompt_in_another_locale() -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ("complete", "--json", "-n", "8", "x = 'é'")
    there = json.loads(run(*arguments, environment=locale).stdout)
    assert there["tokens"] == json.loads(run(*arguments).stdout)["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ctx", "256", "word " * 600], "256"),
        (["--logit-bias", "9999999=1", PROMPT], "9999999"),
        (["--target", DRAFTER, PROMPT], "drafter"),
    ],
)
def test_what_only_the_model_can_refuse(arguments: list[str], named: str) -> None:
    assert named in refused("complete", "-q", *arguments)


def test_a_grammar_that_is_none(tmp_path: Path) -> None:
    grammar = tmp_path / "bad.gbnf"
    grammar.write_text("root ::= (")
    assert "grammar" in refused("complete", "-q", "--grammar-file", str(grammar), PROMPT)
