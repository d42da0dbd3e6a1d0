"""`/infill`, as editors send it at every key press, to a real server."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_local import Model, load
from dflash_local.server.answering.infill_prompt import Gap, OtherText, infill_prompt
from gguf_files import ARRAY, STRING, changed, parts
from server_process import EXACT, serving

PREFIX = "def area(width, height):\n"
SUFFIX = "\n\nprint(area(2, 3))\n"
WIDE = 4096
"""Room for everything."""


@pytest.fixture(scope="module")
def without_infill(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target which never filled a gap."""
    tokens = parts(pair[0])[0]["tokenizer.ggml.tokens"][0]
    named = [f"<|unused_{i}|>" if "fim_" in name else name for i, name in enumerate(tokens)]
    return changed(
        pair[0],
        tmp_path_factory.mktemp("plain") / "target.gguf",
        keys={"tokenizer.ggml.tokens": (named, ARRAY, STRING)},
    )


@pytest.mark.slow
def test_a_model_that_fills_no_gaps_goes_on(without_infill: Path) -> None:
    gap = Gap(PREFIX, SUFFIX, "    return ", (OtherText(text="a = 1\n", filename="a.py"),))
    expected = f"\n\n--- snippet ---\n\na = 1\n{PREFIX}    return "
    options: dict[str, Any] = {"n_ctx": 256, "kv_type": "q8_0", "n_gpu_layers": 0, "n_threads": 1}
    with load(without_infill, quiet=True, **options) as model:
        assert model.target.vocabulary.infill is None
        vocabulary = model.target.vocabulary
        prompt = infill_prompt(vocabulary, gap, room=WIDE)
        assert vocabulary.detokenize(prompt, special=True) == expected
        own = model.generate(expected, max_tokens=8)
    body = {"prompt": "    return ", "input_extra": [{"text": "a = 1\n"}], "n_predict": 8}
    with serving("--target", str(without_infill), *EXACT[:4]) as server, server.client() as client:
        told = [fill(client, **body) for _ in range(2)]
        warnings = [line for line in server.log if "no tokens to fill a gap" in line]
    assert [answer["content"] for answer in told] == [own.text] * 2
    assert len(warnings) == 1


def fill(client: httpx.Client, **body: Any) -> Any:
    given = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, **body}
    answer = client.post("/infill", json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_gap_is_filled_as_the_model_does(client: httpx.Client, model: Model) -> None:
    prompt = infill_prompt(model.target.vocabulary, Gap(PREFIX, SUFFIX, "    return "), room=WIDE)
    told = fill(client, prompt="    return ")
    own = model.generate(prompt, max_tokens=12)
    assert told["content"] == own.text
    assert told["tokens_evaluated"] == len(prompt)
    drawn = fill(client, prompt="    return ", temperature=0.8, seed=5)
    options = {"temperature": 0.8, "seed": 5}
    assert drawn["content"] == model.generate(prompt, max_tokens=12, **options).text


def test_of_several_answers_the_first_is_the_likeliest(client: httpx.Client) -> None:
    first, second, third = fill(client, n_cmpl=3, seed=1, n_predict=4)
    assert first["content"] == fill(client, n_predict=4)["content"]
    for seed, drawn in ((2, second), (3, third)):
        alone = fill(client, temperature=0.8, seed=seed, n_predict=4)
        assert drawn["content"] == alone["content"]


def test_what_an_editor_sends_ahead_is_in_the_cache(client: httpx.Client) -> None:
    text = "".join(f"value_{i} = {i * i}\n" for i in range(40))
    extra = [{"text": text, "filename": "values.py", "time": 1}]
    empty = {"input_prefix": "", "input_suffix": ""}
    warm = fill(client, **empty, input_extra=extra, n_predict=0, t_max_prompt_ms=1)
    assert warm["content"] == ""
    told = fill(client, input_extra=extra)
    assert told["tokens_cached"] >= warm["tokens_evaluated"] - 3  # the marks around no text


METHOD = {
    "input_prefix": "class Point:\n    def __init__(self, x, y):\n",
    "input_suffix": "\n    def norm(self):\n        return self.x + self.y\n",
    "n_predict": 48,
}


@pytest.fixture(scope="module")
def own(model: Model) -> str:
    """The answer to METHOD without limits."""
    gap = Gap(str(METHOD["input_prefix"]), str(METHOD["input_suffix"]))
    prompt = infill_prompt(model.target.vocabulary, gap, room=WIDE)
    return model.generate(prompt, max_tokens=48).text


def test_an_answer_ends_with_its_block(client: httpx.Client, own: str) -> None:
    block = own[: own.index("\n\n") + 1]
    assert block.count("\n") > 1
    told = fill(client, **METHOD, n_indent=4)
    assert (told["content"], told["stop_type"]) == (block, "limit")


def test_a_late_answer_ends_with_its_line(client: httpx.Client, own: str) -> None:
    told = fill(client, **METHOD, t_max_predict_ms=1)
    assert own.startswith(told["content"])
    assert told["content"].endswith("\n")
    assert told["content"] != own
    assert (told["stop_type"], told["truncated"]) == ("limit", False)
    assert fill(client, **METHOD)["content"] == own  # the cache is as it should be


@pytest.mark.slow
def test_a_gap_in_a_long_file_is_filled(client: httpx.Client) -> None:
    file = "def f(x):\n    return x\n\n\n" * 80_000
    extra = [{"text": file, "filename": "long.py"}]
    told = fill(client, input_prefix=file, input_suffix=file, input_extra=extra, n_predict=4)
    assert told["tokens_predicted"] > 0


def test_a_gap_may_be_given_in_tokens(client: httpx.Client, model: Model) -> None:
    gap = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": "    ", "n_predict": 4}
    ids = {
        "input_prefix": model.tokenize(PREFIX),
        "input_suffix": ["\n\n", *model.tokenize(SUFFIX.removeprefix("\n\n"))],
        "prompt": model.tokenize("    "),
    }
    whole, told = (client.post("/infill", json=body).json() for body in (gap, {**gap, **ids}))
    assert (told["prompt"], told["content"]) == (whole["prompt"], whole["content"])
