"""Text in, text out: the ends of answers, the settings, and the refusals."""

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from dflash_local import ContextFullError, FileError, GrammarError, InputError, Model, Result, load
from shapes import exact_model

N = 32
OPTIONS: dict[str, Any] = {"n_ctx": 512, "kv_type": "q8_0", "n_gpu_layers": 0, "n_threads": 1}
NON_ASCII = "root ::= [äöüßéñ€日本語한국🙂😀]{14}"


@pytest.fixture
def prompt() -> str:
    return tiny_coder.prompts()["code"][0]


def cold(model: Model, prompt: str | list[int], **options: Any) -> Result:
    model.forget()
    return model.generate(prompt, **options)


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ({"max_tokens": N}, "length"),
        ({"grammar": NON_ASCII, "temperature": 0.9, "seed": 1}, "stop"),
    ],
)
def test_chunks_are_the_result_in_parts(
    model: Model, prompt: str, how: dict[str, Any], end: str
) -> None:
    """Characters whose bytes are several tokens are never split."""
    model.forget()
    chunks = list(model.stream(prompt, logprobs=1, stop=["no such text"], **how))
    *before, last = chunks
    assert all(chunk.result is None and chunk.finish_reason is None for chunk in before)
    result = last.result
    assert result is not None and last.finish_reason == end
    assert "\ufffd" not in result.text and (len(result.text) == 14) == (end == "stop")
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.tokens] == result.tokens
    assert [entry for chunk in chunks for entry in chunk.logprobs] == result.logprobs
    assert len(chunks) > 3  # they come as they are made


def test_what_is_forgotten_is_not_copied_from(model: Model, prompt: str) -> None:
    model.generate(prompt, max_tokens=N, owner="me")
    assert len(model.engine.earlier) == 1
    model.forget()
    assert len(model.engine.earlier) == 0


@pytest.mark.parametrize(("width", "stop"), [(0, []), (8, []), (8, ["return"]), ("auto", [])])
def test_each_token_is_an_accepted_draft_or_the_targets_own(
    model: Model, prompt: str, width: int | str, stop: list[str]
) -> None:
    """And each piece of the text is of one kind."""
    chunks = list(model.stream(prompt, max_tokens=N, draft_width=width, stop=stop))
    result = chunks[-1].result
    assert result is not None
    assert result.from_draft == [mark for chunk in chunks for mark in chunk.from_draft]
    assert len(result.from_draft) == len(result.tokens)
    assert sum(result.from_draft) == result.stats.accepted
    assert not result.from_draft[0] and not result.from_draft[-1]
    assert (chunks[0].drafting is None) == (width != "auto")
    for told in (*chunks, result):
        assert "".join(piece.text for piece in told.pieces) == told.text
    assert any(piece.from_draft for piece in result.pieces) == any(result.from_draft)
    drafted = [piece.text for chunk in chunks for piece in chunk.pieces if piece.from_draft]
    assert "".join(drafted) == "".join(p.text for p in result.pieces if p.from_draft)


@pytest.mark.one_in(2)
def test_a_seed_that_was_drawn_can_be_given_again(either_model: Model, prompt: str) -> None:
    model = either_model
    drawn = cold(model, prompt, max_tokens=N, temperature=1.0)
    again = cold(model, prompt, max_tokens=N, temperature=1.0, seed=drawn.seed, draft_width=0)
    assert again.tokens == drawn.tokens


# What is asked for


def test_without_a_drafter(model: Model, prompt: str) -> None:
    with load(tiny_coder.pair()[0], draft_width=0, quiet=True, **OPTIONS) as plain:
        assert plain.draft_width == 0 and plain.drafter is None
        result = plain.generate(prompt, max_tokens=N)
        assert result.tokens == cold(model, prompt, max_tokens=N).tokens
        assert result.stats.drafted == 0
        assert plain.generate(prompt, max_tokens=3, draft_width=1).stats.drafted == 0
        with pytest.raises(InputError, match="there is no drafter; load one with draft="):
            plain.generate(prompt, draft_width=8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", [None, "copies"])
def test_without_a_drafter_it_copies(model: Model, prompt: str, draft: str | None) -> None:
    with load(tiny_coder.pair()[0], draft, quiet=True, **OPTIONS) as copying:
        assert copying.draft_width == "auto" and copying.drafter is None
        expected = cold(model, prompt * 3, max_tokens=N, draft_width=0)
        assert copying.generate(prompt * 3, max_tokens=N).tokens == expected.tokens
        result = copying.generate(prompt * 3, max_tokens=N, draft_width=8)
        assert result.tokens == expected.tokens
        assert result.stats.copied == result.stats.drafted > 0
        assert result.from_copy == result.from_draft
        with pytest.raises(InputError, match="a verify pass allows at most 64"):
            copying.generate(prompt, draft_width=65)


def test_requests_may_ask_for_chains(prompt: str) -> None:
    with exact_model("tree", n_ctx=512) as model:
        assert model.generate(prompt, max_tokens=N).stats.tree_rounds > 0
        chained = model.generate(prompt, draft_shape="chain", max_tokens=N)
        assert chained.stats.drafted and not chained.stats.tree_rounds
        with pytest.raises(InputError, match="draft_shape is 'star'; expected one of chain"):
            model.generate(prompt, draft_shape="star")


def test_chat_is_the_models_own_template(model: Model) -> None:
    messages = [{"role": "user", "content": "Write a function `add`."}]
    rendered = model.detokenize(model.chat_prompt(messages))
    assert "Write a function `add`." in rendered
    text = f"<|im_start|>user\n{messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert model.chat_prompt(messages) == model.tokenize(text)
    expected = cold(model, text, max_tokens=8)
    assert model.chat(messages, max_tokens=8).tokens == expected.tokens
    thinking = model.chat(messages, max_tokens=8, chat_template_kwargs={"enable_thinking": False})
    assert thinking.text
    chunks = list(model.stream_chat(messages, max_tokens=8))
    assert "".join(chunk.text for chunk in chunks) == expected.text


def test_text_to_tokens_and_back(model: Model) -> None:
    for text in ("def f(x):\n    return x\n", "naïve café 🙂", "tab\there", ""):
        assert model.detokenize(model.tokenize(text)) == text
    (marker,) = model.tokenize("<|im_end|>")
    assert model.detokenize([marker]) == ""
    assert len(model.tokenize("<|im_end|>", special=False)) > 1
    for tokens in ([-1], [8192], [10**30], ["a"], [1.5]):
        with pytest.raises(InputError, match="is not in the vocabulary; expected 0 to 8191"):
            model.detokenize(tokens)  # type: ignore[arg-type]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_token": 5}, "'max_token' is not an option of a request; did you mean 'max_tokens'?"),
    *(
        ({"max_tokens": n}, f"max_tokens is {n!r}; expected a whole number, 1 or more")
        for n in (0, 2.5, -(10**30), float("nan"), "5", True)
    ),
    ({"min_tokens": 25, "max_tokens": 24}, "min_tokens is 25, but max_tokens 24"),
    *(
        ({"draft_width": n}, f"draft_width is {n!r}; expected a whole number, 0 or more")
        for n in (-1, 2.5, "8")
    ),
    ({"draft_width": 17}, "draft_width is 17; this drafter's block allows at most 16"),
    ({"draft_width": 10**30}, "draft_width is 1000"),
    ({"id_slot": -1}, "id_slot is -1; expected a whole number, 0 or more"),
    ({"context_shift": True, "n_keep": -2}, "n_keep is -2; expected a whole number, -1 or more"),
    ({"context_shift": True, "n_discard": -1}, "n_discard is -1; expected a whole number, 0 or"),
    ({"prompt_logprobs": 8193}, "prompt_logprobs is 8193; expected 0 to 8192"),
    ({"stop": 3}, "stop is 3"),
    ({"stop": [""]}, "stop is ''"),
    ({"stop": ["a", None]}, "stop is None"),
    ({"cancel": 5}, "cancel is 5; give a threading.Event"),
    ({"owner": 5}, "owner is 5; give a text, or None"),
    ({"owner": "\ud800"}, "owner is '.ud800', which has half a surrogate pair"),
    ({"bad_words": 5}, "bad_words is 5; give a text, or several in a list"),
    ({"bad_words": ["a", None]}, "bad_words is None; give a text, or several in a list"),
    ({"id_slot": "a"}, "id_slot is 'a'; expected a whole number, 0 or more"),
    ({"context_shift": "no"}, "context_shift is 'no'; give True or False"),
    ({"cache_prompt": 0}, "cache_prompt is 0; give True or False"),
    ({"thinking_budget": 5}, "thinking_budget is 5; give what Model.thinking_budget makes"),
    ({"temperature": -0.1}, r"temperature is -0\.1"),
    ({"seed": 10**30}, "seed is 1000"),
    ({"logit_bias": {8192: 1.0}}, "a token of logit_bias is 8192"),
    ({"allowed_token_ids": [8192]}, "allowed_token_ids has 8192, which is no token"),
    ({"allowed_token_ids": "yes"}, "allowed_token_ids is 'yes'; give"),
    ({"bad_words": ["fib"]}, "bad_words has 'fib', which this model writes in several tokens"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_are_one_line(model: Model, options: dict[str, Any], message: str) -> None:
    for ask in (model.generate, model.stream):  # at the call, not at the first chunk
        with pytest.raises(InputError, match=message) as found:
            ask("x", **options)
        assert "\n" not in str(found.value)
        assert len(str(found.value)) < 300


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", InputError, "the prompt is empty; give at least one token"),
        ([], InputError, "the prompt is empty"),
        (None, InputError, "the prompt is None; give a text, or token ids in a list"),
        ([None], InputError, r"the prompt is \[None\]"),
        ([1.5], InputError, r"the prompt is \[1\.5\]"),
        (["a"], InputError, r"the prompt is \['a'\]"),
        (b"abc", InputError, "the prompt is b'abc'"),
        ([-1], InputError, "token id -1 of the prompt is not in 0 to 8191"),
        ([8192], InputError, "token id 8192 of the prompt"),
        ([10**30], InputError, "token id 1000"),
        ("\ud800", InputError, "half a surrogate pair"),
        ([1] * 2048, ContextFullError, "the prompt has 2048 tokens, the context holds 2048"),
        ("x " * 40000, ContextFullError, "tokens, the context holds 2048"),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_bad_prompts_are_one_line(
    model: Model, prompt: Any, error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=message) as found:
        model.generate(prompt)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 300


def test_a_bad_grammar(model: Model, prompt: str) -> None:
    expected = cold(model, prompt, max_tokens=N).tokens
    with pytest.raises(GrammarError):
        model.generate(prompt, grammar="root ::= (")
    assert model.generate(prompt, max_tokens=N).tokens == expected


# Loading


def test_pairs_that_do_not_load(tmp_path: Path) -> None:
    target, drafter = tiny_coder.pair()
    missing, no_file = tmp_path / "missing.gguf", tmp_path / "no.gguf"
    no_file.write_bytes(b"GGUX" + bytes(100))
    cases: list[tuple[list[Path], str]] = [
        ([missing], "missing.gguf"),
        ([target, missing], "missing.gguf"),
        ([no_file], "no.gguf"),
        ([target, no_file], "no.gguf"),
        ([drafter], "drafter"),
        ([drafter, target], "drafter"),
    ]
    for files, named in cases:
        with pytest.raises(FileError, match=named) as found:
            load(*files, quiet=True)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_ctx": 10**12}, "ctx|context"),
        ({"n_ctx": "big"}, "n_ctx"),
        ({"n_threads": 0}, "n_threads"),
        ({"n_threads": 10**6}, "n_threads"),
        ({"n_threads": "2"}, "n_threads"),
        ({"flash_attn": False, "kv_type": "q8_0"}, "needs flash attention"),
        ({"main_gpu": -1}, "main_gpu"),
        ({"draft_shape": "bush"}, "draft_shape is 'bush'"),
        ({"nctx": 5}, "'nctx' is not an option of load; did you mean 'n_ctx'"),
        ({"cache_mb": -1}, "cache_mb is -1; expected"),
        ({"cache_mb": 1.5}, "cache_mb is 1.5; expected"),
        ({"cache_dir": "x"}, "cache_dir needs room in memory, too; give cache_mb"),
        ({"cache_mb": 1, "cache_dir": __file__}, "cannot be used: .*name a folder"),
        *(({"draft_window": n}, "draft_window is") for n in (-1, 1.5, "many", True)),
        ({"exact": True, "draft_shape": "tree"}, "exact"),
        ({"exact": True, "n_seq": 65}, "n_seq is 65"),
        ({"exact": True, "n_seq": 4, "n_ctx": 48}, "n_ctx is 48"),
        ({"lora": "a.gguf"}, "expected a list of files"),
        ({"lora": [("a.gguf", float("nan"))]}, "scale of lora a.gguf is nan"),
        ({"lora": ["a.gguf:inf"]}, "scale of lora a.gguf is inf"),
        ({"lora": [("a.gguf", True)]}, "scale of lora a.gguf is True"),
    ],
    ids=str,
)
def test_settings_that_do_not_load(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named) as found:
        load(*tiny_coder.pair(), quiet=True, **options)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"top_k": 0}])
@pytest.mark.parametrize("width", [0, 8])
def test_an_answer_has_allowed_tokens_alone(model: Model, how: dict[str, Any], width: int) -> None:
    yes_or_no = [model.tokenize(text)[0] for text in ("Yes", "No")]
    allowed = {"allowed_token_ids": yes_or_no, "max_tokens": 5, "draft_width": width}
    assert set(model.generate("def f(", **how, **allowed).tokens) <= set(yes_or_no)


def test_an_answer_has_no_bad_word(model: Model) -> None:
    prompt = "def fib(n):"
    usual = {"max_tokens": 24, "temperature": 0}
    text = model.generate(prompt, **usual).text
    assert "return" in text
    found = model.generate(prompt, bad_words=["return"], **usual)
    assert found.tokens == model.generate(prompt, bad_words="return", **usual).tokens
    assert "return" not in found.text
    assert (
        found.tokens == model.generate(prompt, bad_words=["return"], draft_width=0, **usual).tokens
    )


def test_a_grammar_goes_with_texts_in_the_bias(model: Model) -> None:
    """Asynchronous callers ask first whether the grammar is known."""
    options: dict[str, Any] = {"json_schema": {"type": "integer"}, "logit_bias": {"7": 50.0}}
    answer = asyncio.run(model.agenerate("x", **options, max_tokens=2, temperature=0))
    assert answer.text == "77"


def test_a_model_is_not_copied_or_sent(model: Model) -> None:
    for send in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load it in each process"):
            send(model)


def test_the_hidden_states_that_the_drafter_reads_are_numbers(model: Model) -> None:
    for n in (1, 2, 40):
        model.generate("def add(a, b):", max_tokens=n, draft_width=8)
        largest = model.largest_hidden_state()
        assert largest is not None and 0 < largest < 65504
