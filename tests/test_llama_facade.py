"""`Llama` beside llama-cpp-python's own: the same text, and dicts of the same shape."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from adapters import write_lora
from chat_models import WEATHER, with_template
from dflash_local import InputError, Llama

PROMPT = "def add(a, b):"
CHAT = [{"role": "user", "content": "Write `is_prime` in Python."}]


@pytest.fixture(scope="module")
def ours(pair: tuple[Path, Path]) -> Iterator[Llama]:
    target, drafter = pair
    with Llama(
        str(target), draft_model=drafter, n_ctx=1024, n_threads=1, type_k=8, verbose=False
    ) as llm:
        llm.model.draft_width = 8
        yield llm


@pytest.fixture(scope="module")
def theirs(pair: tuple[Path, Path]) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(
        str(pair[0]), n_ctx=1024, n_threads=1, type_k=8, type_v=8, flash_attn=True, verbose=False
    )
    yield llm
    llm.close()


def shape(told: Any) -> Any:
    """The keys of an answer, and the types of its values."""
    if isinstance(told, dict):
        return {key: shape(value) for key, value in told.items()}
    return [shape(value) for value in told] if isinstance(told, list) else type(told)


def test_its_defaults_give_the_text_of_theirs(pair: tuple[Path, Path]) -> None:
    given: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0}
    with Llama(str(pair[0]), draft_model=pair[1], **given) as llm:
        assert not llm.model.target.options.flash_attn
        mine = llm(PROMPT, **asked)["choices"][0]["text"]
    llm = llama_cpp.Llama(str(pair[0]), **given)
    assert mine == llm(PROMPT, **asked)["choices"][0]["text"]
    llm.close()


@pytest.mark.slow
def test_positions_caches_and_keys_are_bent_as_theirs(pair: tuple[Path, Path]) -> None:
    given: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False, "flash_attn": True}
    given |= {"rope_freq_base": 5000.0, "rope_freq_scale": 0.5, "type_k": 8, "type_v": 1}
    given |= {"kv_overrides": {"qwen3.attention.layer_norm_rms_epsilon": 0.01}}
    texts = []
    for kind, more in ((Llama, given), (llama_cpp.Llama, given), (Llama, {"verbose": False})):
        llm: Any = kind(str(pair[0]), **more)
        texts.append(llm(PROMPT, max_tokens=24, temperature=0.0)["choices"][0]["text"])
        llm.close()
    assert texts[0] == texts[1] != texts[2]


def test_what_is_missing_says_what_to_take(ours: Llama) -> None:
    missing = {name for name in dir(llama_cpp.Llama) if not name.startswith("_")} - set(dir(ours))
    for name in (missing - {"ctx"}) | {"metadata", "n_tokens", "scores", "chat_format"}:
        with pytest.raises(AttributeError, match=f"no {name} here; "):
            getattr(ours, name)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = ours.nonesuch  # type: ignore[attr-defined]


def test_every_argument_may_have_its_default(pair: tuple[Path, Path]) -> None:
    arguments = inspect.signature(llama_cpp.Llama.__init__).parameters.values()
    usual = {each.name: each.default for each in arguments if each.default is not each.empty}
    with Llama(pair[0], **{**usual, "verbose": False}) as llm:
        assert llm.n_ctx() == 512 and llm.verbose is False


def test_a_file_of_the_hub_is_named_by_its_quantisation() -> None:
    with pytest.raises(InputError, match="such as"):
        Llama.from_pretrained("owner/repo", "model.gguf")
    with pytest.raises(InputError, match="owner/repo"):
        Llama.from_pretrained("owner/repo", "*q8_0.gguf", verbose=False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stop": ["return"]}, {"seed": 3}], ids=str)
def test_a_completion_is_theirs(ours: Llama, theirs: llama_cpp.Llama, more: dict[str, Any]) -> None:
    asked = {"max_tokens": 32, "temperature": 0.0, **more}
    mine, other = ours(PROMPT, **asked), theirs(PROMPT, **asked)
    assert mine["choices"][0]["text"] == other["choices"][0]["text"]
    assert mine["choices"][0]["finish_reason"] == other["choices"][0]["finish_reason"]
    assert mine["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert shape(mine) == shape(other)
    assert ours(PROMPT, None, 4, temperature=0.0)["usage"]["completion_tokens"] == 4
    mine, *_ = pieces = list(ours(PROMPT, stream=True, **asked))
    other = next(iter(theirs(PROMPT, stream=True, **asked)))
    assert mine.keys() == other.keys() and mine["choices"][0].keys() == other["choices"][0].keys()
    whole = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert whole == ours(PROMPT, **asked)["choices"][0]["text"]
    assert pieces[-1]["choices"][0]["finish_reason"]


def test_a_chat_completion_is_theirs(ours: Llama, theirs: llama_cpp.Llama) -> None:
    asked = {"max_tokens": 32, "temperature": 0.0}
    mine = ours.create_chat_completion(CHAT, **asked)
    other = theirs.create_chat_completion(CHAT, **asked)
    assert mine["choices"][0]["message"] == other["choices"][0]["message"]
    assert shape(mine) == shape(other)
    first, *pieces = ours.create_chat_completion(CHAT, stream=True, **asked)
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == mine["choices"][0]["message"]["content"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_an_adapter_acts_as_theirs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    names = [f"blk.{layer}.ffn_down.weight" for layer in range(8)]
    lora = str(write_lora(tmp_path / "lora.gguf", pair[0], names=names, gain=2.0))
    told = []
    for scale in (0.0, 1.0):
        given: dict[str, Any] = {"lora_path": lora, "lora_scale": scale, "n_ctx": 512}
        with Llama(pair[0], n_threads=1, verbose=False, **given) as llm:
            mine = llm(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
        other = llama_cpp.Llama(str(pair[0]), n_threads=1, verbose=False, **given)
        theirs: Any = other(PROMPT, max_tokens=24, temperature=0)
        other.close()
        assert mine == theirs["choices"][0]["text"]
        told.append(mine)
    assert told[0] != told[1]


def test_tokens_are_theirs(ours: Llama, theirs: llama_cpp.Llama) -> None:
    text = "naïve café 🙂".encode()
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.detokenize(ours.tokenize(text)) == text
    ids = theirs.tokenize(b"<|im_end|>", False, True)
    assert ours.detokenize(ids, None, True) == theirs.detokenize(ids, None, True) != b""
    assert (ours.n_ctx(), ours.n_vocab()) == (theirs.n_ctx(), theirs.n_vocab())
    with pytest.raises(InputError, match="give bytes"):
        ours.tokenize("text")  # type: ignore[arg-type]


def test_grammars_and_schemas(ours: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    for given in (grammar, 'root ::= "yes" | "no"'):
        told = ours(PROMPT, grammar=given, max_tokens=8)["choices"][0]["text"]
        assert told in ("yes", "no")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked = {"type": "json_object", "schema": schema}
    told = ours.create_chat_completion(CHAT, response_format=asked, max_tokens=24)
    assert json.loads(told["choices"][0]["message"]["content"]).keys() == {"ok"}


def test_a_seed_gives_the_same_text_again(ours: Llama) -> None:
    def text(**more: Any) -> str:
        told: str = ours(PROMPT, max_tokens=8, temperature=2.0, **more)["choices"][0]["text"]
        return told

    assert text(seed=7) == text(seed=7)
    ours.set_seed(7)
    assert text() == text(seed=7)


def test_calls_of_tools(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = with_template(pair[0], tmp_path / "tools.gguf", "qwen3")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 400}
    with Llama(target, n_ctx=1024, n_threads=1, seed=1, verbose=False) as llm:
        told = llm.create_chat_completion(CHAT, **asked)["choices"][0]
        (call,) = told["message"]["tool_calls"][:1]
        assert told["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
        assert "city" in json.loads(call["function"]["arguments"])
        pieces = list(llm.create_chat_completion(CHAT, stream=True, **asked))
        deltas = [piece["choices"][0]["delta"] for piece in pieces]
        assert any("tool_calls" in delta for delta in deltas)


@pytest.mark.parametrize(
    "more", [{"mirostat_mode": 2}, {"logprobs": 3}, {"suffix": "x"}, {"grammar": 3}], ids=str
)
def test_what_is_not_known_is_refused_by_name(ours: Llama, more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(more))):
        ours(PROMPT, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"lora_base": "x"},
        {"chat_format": "chatml"},
        {"type_k": 5},
        {"type_v": 5},
        {"split_mode": 9},
    ],
)
def test_bad_settings_are_refused_by_name(pair: tuple[Path, Path], more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(more))):
        Llama(pair[0], **more)
