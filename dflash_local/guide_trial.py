"""The child process of `guide`: compiles a grammar, which can take hours, or the process with it.

Reads `{"source": grammar, "limits": {...}, "stack": bytes}` from stdin and writes
`{"fault": text}`, empty for a grammar that compiles. It knows nothing of this package, so as to
start fast.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits

_MOST_BYTES = 2 << 30


def main(request: dict[str, Any]) -> None:
    with suppress(ImportError, ValueError, OSError):  # not on this system, or less is allowed
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    limits = LLParserLimits(**request["limits"])

    def compile_it() -> None:
        bad, faults = LLMatcher.validate_grammar_with_warnings(request["source"], limits=limits)
        json.dump({"fault": faults[0] if bad else ""}, sys.stdout)

    threading.stack_size(request["stack"])
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(json.load(sys.stdin))
