"""Prompts as token ids of the model at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.bench.prompts.prompt import BenchPrompt

if TYPE_CHECKING:
    from dflash_local.model import Model

DEPTHS = (1024, 8192, 32768)
"""Tokens after which the answers of long prompts end."""

_SPARE_ROWS = 32  # between the end of an answer and its depth: room for a last draft
_MOST_CHARACTERS = 400_000  # about 100,000 tokens, enough for several of the deepest prompts
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A prompt as a model reads it. `index` counts within the category. `answer` is the text for a
    replay to emit."""

    category: str
    index: int
    tokens: list[int]
    answer: list[int] | None = None


def tokenized(
    model: Model, prompts: Sequence[BenchPrompt], *, room: int, thinking: bool = False
) -> tuple[list[Case], list[str]]:
    """The prompts as `model` reads them, and a note for each kind that it cannot read.

    `room` are the tokens of context that the answer needs; a given one may need fewer. `thinking`
    leaves the reasoning of chat templates on, which most published drafters were not trained for.
    Raises InputError for messages that the model's template refuses.
    """
    cases: list[Case] = []
    counts: Counter[str] = Counter()
    left_out: Counter[tuple[str, str]] = Counter()
    for prompt in prompts:
        tokens, fault, answer = [], "", None
        if prompt.infill is not None and model.target.vocabulary.infill is None:
            fault = "the model has no fill-in-the-middle tokens"
        elif prompt.messages and model.target.chat_template is None:
            fault = "the model has no chat template"
        else:
            tokens = _tokens(model, prompt, thinking)
            if prompt.answer is not None:
                answer = model.target.vocabulary.tokenize(
                    prompt.answer, special=False, add_special=False
                )
            needed = room if answer is None else min(room, len(answer))
            if len(tokens) + needed > model.n_ctx:
                fault = f"prompt and answer exceed the context of {model.n_ctx} tokens"
        if fault:
            left_out[prompt.category, fault] += 1
            continue
        cases.append(Case(prompt.category, counts[prompt.category], tokens, answer))
        counts[prompt.category] += 1
    notes = [f"{category}: {n} left out, {why}" for (category, why), n in left_out.items()]
    return cases, notes


def _tokens(model: Model, prompt: BenchPrompt, thinking: bool) -> list[int]:
    if prompt.text is not None:
        return model.target.vocabulary.tokenize(prompt.text, add_special=prompt.add_special)
    if prompt.infill is not None:
        vocabulary, marks = model.target.vocabulary, model.target.vocabulary.infill
        assert marks is not None, "the caller has looked"
        before, after = (
            vocabulary.tokenize(text, special=False, add_special=False) for text in prompt.infill
        )
        return [*vocabulary.start(), *marks.around(before, after)]
    kwargs = {} if thinking else {"enable_thinking": False}
    return model.chat_prompt(prompt.messages, chat_template_kwargs=kwargs)


def depth_lengths(
    depths: Sequence[int], *, n_ctx: int, room: int
) -> tuple[dict[str, int], list[str]]:
    """Tokens of the prompts whose answers, of `room` tokens, end within these depths, by the names
    of the depths; and a note for each depth that is left out."""
    lengths: dict[str, int] = {}
    notes: list[str] = []
    for depth in depths:
        name, n = depth_name(depth), depth - room - _SPARE_ROWS
        if depth > n_ctx:
            notes.append(f"{name}: left out, the context holds {n_ctx} tokens")
        elif n < 1:
            notes.append(f"{name}: left out, an answer of {room} tokens leaves no room for it")
        else:
            lengths[name] = n
    return lengths, notes


def long_cases(model: Model, lengths: Mapping[str, int], *, limit: int) -> list[Case]:
    """Long texts to continue: `limit` prompts for each of `lengths`, tokens by category. The text
    is this package's own source code, which is wherever the package is."""
    cases: list[Case] = []
    files = sorted(_PACKAGE.rglob("*.py")) if lengths else []
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)[:_MOST_CHARACTERS]
    tokens = model.tokenize(text) if lengths else []
    for name, n in lengths.items():
        while len(tokens) < n:  # a tokenizer of few, long tokens
            tokens += tokens
        # Each prompt begins elsewhere in the text, so that no cache has its beginning.
        step = len(tokens) // limit
        for index in range(limit):
            start = index * step
            cases.append(Case(name, index, [*tokens[start:], *tokens[:start]][:n]))
    return cases


def depth_name(depth: int) -> str:
    """`1k` for 1024."""
    return f"{depth // 1024}k" if depth % 1024 == 0 else str(depth)
