"""Prompts in the model's own tokens: every category, and what does not fit."""

from dflash_local import Model
from dflash_local.bench.prompts.case import DEPTHS, depth_lengths, long_cases, tokenized
from dflash_local.bench.prompts.prompt import BenchPrompt, built_in


def test_chat_prompts_go_through_the_template(model: Model) -> None:
    prompts = built_in(("chat", "code"), limit=2)
    cases, _ = tokenized(model, prompts, room=16)
    assert [case.category for case in cases] == ["chat", "chat", "code", "code"]
    start = model.tokenize("<|im_start|>user\n")
    assert all(case.tokens[: len(start)] == start for case in cases)


def test_gaps_are_filled_between_the_models_own_marks(model: Model) -> None:
    found = model.target.vocabulary.infill
    assert found is not None
    marks = found.prefix, found.suffix, found.middle
    names = [model.target.vocabulary.name(token) for token in marks]
    assert names == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    (case,), _ = tokenized(model, [BenchPrompt("fim", infill=("a = <|im_end|>", "\nb"))], room=16)
    assert (case.tokens[0], case.tokens[-1]) == (marks[0], marks[2])
    assert marks[1] in case.tokens
    # Names of special tokens in the user's own code are text.
    assert not any(model.target.vocabulary.ends_text(token) for token in case.tokens)


def test_what_does_not_fit_the_context_is_left_out_and_told(model: Model) -> None:
    prompts = [BenchPrompt("own", text="a" * 40000), BenchPrompt("own", text="b")]
    cases, notes = tokenized(model, prompts, room=16)
    assert len(cases) == 1
    assert notes == ["own: 1 left out, prompt and answer exceed the context of 2048 tokens"]


def test_answers_to_long_prompts_end_at_their_depth(model: Model) -> None:
    lengths, notes = depth_lengths([*DEPTHS, 64], n_ctx=model.n_ctx, room=64)
    cases = long_cases(model, lengths, limit=2)
    assert [case.category for case in cases] == ["1k", "1k"]
    assert all(1024 - 128 < len(case.tokens) < 1024 - 64 for case in cases)
    assert cases[0].tokens[:8] != cases[1].tokens[:8]
    assert [note.split(":")[0] for note in notes] == ["8k", "32k", "64"]
