"""Names of control tokens in messages stay text: one that quotes a template or a web page must not
be able to end its turn and begin another one.

Messages are marked before the template puts them between its own control tokens, and the prompt is
tokenised by these marks. llama-server and vLLM read such names as tokens wherever they stand. Who
wants that here gives the whole prompt as a text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local.chat.form import THINK
from dflash_local.chat.tool import Tool
from dflash_local.target_model.vocabulary import Vocabulary

_MARK = "\ufdd0"
"""Inside of a name it makes it another text. Unicode keeps it for such uses; one that was in the
text comes twice."""
_MARKS = re.compile(f"{_MARK}({_MARK}?)")


def quoted(value: Any, vocabulary: Vocabulary) -> Any:
    """Messages or tools, with a mark inside of each name of a control token in their texts."""

    def inner(value: Any) -> Any:
        if isinstance(value, str):
            return _quoted_text(value, vocabulary)
        value = value.shown() if isinstance(value, Tool) else value
        if isinstance(value, Mapping):
            return {key: inner(each) for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [*map(inner, value)]
        return value

    try:
        return inner(value)
    except RecursionError:  # the template refuses it in words
        return value


def _quoted_text(text: str, vocabulary: Vocabulary) -> str:
    parts, end = [], 0
    for begin, stop in vocabulary.control_names(text):
        # Templates look for marks of thoughts in earlier answers, to leave these out.
        if stop - begin > 1 and text[begin:stop] not in THINK:
            parts += [text[end : begin + 1].replace(_MARK, 2 * _MARK), _MARK]
            end = begin + 1
    return "".join([*parts, text[end:].replace(_MARK, 2 * _MARK)])


def tokenized(prompt: str, vocabulary: Vocabulary, n_ctx: int) -> list[int]:
    """Token ids of a rendered prompt, in which names of control tokens are these tokens, except for
    marked ones. Raises as `Vocabulary.tokenize`."""
    if _MARK not in prompt:
        # Templates write the first token themselves.
        return vocabulary.tokenize(prompt, add_special=False, n_ctx=n_ctx)
    return vocabulary.tokenize_apart(prompt, unquoted, n_ctx=n_ctx)


def unquoted(prompt: str) -> str:
    """A rendered prompt without the marks."""
    return _MARKS.sub(r"\1", prompt)
