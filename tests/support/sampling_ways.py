"""Ways to sample, each of which must give the plain answer with drafts, too."""

from typing import Any

# Any text in the characters of Python, but for capitals and double quotes.
PYTHON_LIKE = r"""
root ::= line+
line ::= " "* statement? "\n"
statement ::= [a-z_@`] [a-z0-9_ ()\[\]{}.,:;=+*/%<>!#'`-]*
"""
JSON_LIST = r"""
root ::= "[" item ("," item)* "]"
item ::= " "? (string | number)
string ::= "\"" [a-z_ ]* "\""
number ::= [0-9]+
"""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded with penalties": {
        "temperature": 0.8,
        "seed": 7,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
    "seeded with llama.cpp's other samplers": {
        "temperature": 0.9,
        "seed": 3,
        "dry_multiplier": 0.8,
        "dry_allowed_length": 1,
        "top_n_sigma": 2.0,
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
        "dynatemp_range": 0.5,
    },
    "seeded with XTC among a few": {
        "temperature": 0.9,
        "seed": 4,
        "top_k": 8,
        "min_p": 0.0,
        "xtc_probability": 0.5,
    },
    "biased": {"logit_bias": {265: -float("inf"), 11: 2.0, 300: 1.5}},
    "Python-like grammar": {"grammar": PYTHON_LIKE},
    "seeded JSON grammar": {"grammar": JSON_LIST, "temperature": 0.8, "seed": 11},
}
