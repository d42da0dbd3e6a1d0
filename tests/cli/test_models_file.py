"""`--model` and `--models`: the files they read, and the one line in which they refuse the rest."""

import math
from pathlib import Path

import click
import pytest

import tiny_coder
from dflash_local.cli.models_file import NamedModel, check_names, named_model, read_models
from dflash_local.cli.serve import SETTINGS_PER_MODEL
from dflash_local.errors import InputError

TARGET, DRAFTER = tiny_coder.pair()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with files that could be models."""
    for name in ("target.gguf", "draft.gguf", "a,b.gguf"):
        (tmp_path / name).touch()
    return tmp_path


def written(folder: Path, text: str) -> list[NamedModel]:
    file = folder / "models.toml"
    file.write_text(text, encoding="utf-8")
    return read_models(file, SETTINGS_PER_MODEL)


def test_a_file_of_models(folder: Path) -> None:
    small, large = written(
        folder,
        f"""
        [small]
        target = "target.gguf"
        keep_alive = '10m'
        ["qwen3:8b.q4"]
        target = "{TARGET}"
        draft = "a,b.gguf"
        ctx = 4096
        gpu_layers = 0
        kv-type = "q8_0"
        parallel = 2
        draft_width = "auto"
        temp = 0.5
        min_p = 0
        keep_alive = -1
        """,
    )
    assert small == NamedModel("small", folder / "target.gguf", settings={"keep_alive_s": 600})
    assert (large.name, large.target) == ("qwen3:8b.q4", TARGET)
    assert large.draft == folder / "a,b.gguf"
    loading = {"n_ctx": 4096, "n_gpu_layers": 0, "kv_type": "q8_0", "n_seq": 2}
    sampling = {"draft_width": "auto", "temperature": 0.5, "min_p": 0}
    assert large.settings == {**loading, **sampling, "keep_alive_s": math.inf}


TARGET_LINE = "[a]\ntarget = 'target.gguf'\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *(("", "names no model"), ("[a\n", "line 1"), (f"{TARGET_LINE}ctx = \n", "line 3")),
        *((f"{TARGET_LINE}[a]\n", "twice"), ("a = " + "[" * 5000, "not TOML")),
        ("target = 'target.gguf'", "is not in a table"),
        ("[a]\nctx = 512\n", r"\[a\] has no target"),
        ("[a]\ntarget = 'gone.gguf'\n", r"\[a\] target: .*gone\.gguf"),
        ("[a]\ntarget = '.'\n", r"\[a\] target: "),
        ("[a]\ntarget = 1979-05-27\n", r"\[a\] target: 1979-05-27"),
        (f"{TARGET_LINE}draft = 'gone.gguf'\n", r"\[a\] draft: .*gone\.gguf"),
        (f"{TARGET_LINE}context = 1\n", "no such setting; .*target, draft, ctx"),
        (f"{TARGET_LINE}threads = 1\n", "no such setting"),
        *(
            (f"{TARGET_LINE}ctx = {value}\n", rf"\[a\] ctx: {told}")
            for value, told in (("'many'", "many"), (-1, -1), (2.5, r"2\.5"), ("true", "true"))
        ),
        (f"{TARGET_LINE}temp = true\n", r"\[a\] temp: true"),
        (f"{TARGET_LINE}temp = [0.5]\n", r"\[a\] temp: \[0\.5\]"),
        (f"{TARGET_LINE}parallel = 65\n", r"\[a\] parallel: 65"),
        (f"{TARGET_LINE}draft_shape = 'bush'\n", "chain"),
        (f"{TARGET_LINE}keep_alive = 'soon'\n", "soon"),
        ("[qwen2.5-coder]\ntarget = 'target.gguf'\n", r'\["qwen2\.5-coder"\]'),
        ("[' a']\ntarget = 'target.gguf'\n", "cannot be a model's name"),
        ("['']\ntarget = 'target.gguf'\n", "cannot be a model's name"),
    ],
)
def test_files_that_are_refused(folder: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named) as refusal:
        written(folder, text)
    assert "\n" not in str(refusal.value)
    assert "models.toml" in str(refusal.value)


def test_a_model_on_the_command_line(folder: Path) -> None:
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    assert named_model(f"a={target}") == NamedModel("a", target)
    assert named_model(f"qwen3:8b={target},{draft}") == NamedModel("qwen3:8b", target, draft)


@pytest.mark.parametrize(
    "value", ["", "a", "=x", "a=", "a=,", "a={target},", "a=gone.gguf", "=", ","]
)
def test_models_on_the_command_line_that_are_none(folder: Path, value: str) -> None:
    with pytest.raises(click.BadParameter):
        named_model(value.format(target=folder / "target.gguf"))


@pytest.mark.parametrize("word", ["mtp", "copies", "none"])
def test_a_word_in_place_of_a_drafter(folder: Path, word: str) -> None:
    assert named_model(f"a={folder / 'target.gguf'},{word}").draft == word
    file = folder / "words.toml"
    file.write_text(f'[a]\ntarget = "target.gguf"\ndraft = "{word}"\n')
    assert read_models(file, {})[0].draft == word


def test_two_models_of_one_name() -> None:
    models = [NamedModel(name, TARGET) for name in ("a", "b", "a")]
    with pytest.raises(InputError, match="two models are named 'a'"):
        check_names(models)
    check_names(models[:2])
