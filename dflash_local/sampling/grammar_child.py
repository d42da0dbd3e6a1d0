"""The child process of `grammar`: compiles a grammar, which can take hours or crash the process.

It imports little, so that it starts fast.
"""

import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from dflash_local.trial.child import bound_memory, die_quietly, on_deep_stack, say

_MOST_BYTES = 2 << 30
_LAYOUT = {
    # Allows indentation. With unlimited white space, small models may write nothing else.
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # oneOf is read as anyOf, as usual: a grammar cannot say that no second schema fits.
    "coerce_one_of": True,
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def main(request: dict[str, Any]) -> None:
    """Compile `text`, a grammar of a `kind`, within `limits`, on a `stack` of this many bytes."""
    die_quietly()
    bound_memory(_MOST_BYTES)
    on_deep_stack(lambda: _compile(request), request["stack"])


def _compile(request: dict[str, Any]) -> None:
    try:
        source = _source(request["kind"], request["text"])
    except RecursionError:
        say(fault="it is nested too deeply")
        return
    except Exception as error:  # gbnf_to_lark raises plain Exception
        say(fault=str(error))
        return
    limits = LLParserLimits(**request["limits"])
    bad, faults = LLMatcher.validate_grammar_with_warnings(source, limits=limits)
    if bad:
        say(fault=faults[0])
    else:
        say(done=True, source=source)


def _source(kind: str, text: str) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=_LAYOUT)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_lark(_lark(text) if kind == "grammar" else text)


def _lark(gbnf: str) -> str:
    """llguidance's own translation of GBNF, with workarounds for two bugs of its version 1.7."""
    from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

    # It writes the repetition of a repetition as "a"**, which is not Lark.
    RepetitionNode.is_atomic = lambda self: False  # type: ignore[method-assign]
    # It drops zeros from the hexadecimal digits of a character.
    return gbnf_to_lark(_ESCAPE.sub(_spelled_out, gbnf))


def _spelled_out(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code is None or int(code, 16) < 0x20:
        return escape[0]
    character = chr(int(code, 16))
    return f"\\{character}" if character in '"\\[]^-' else character
