"""Tensors that lie on another device than their layer: the experts of a mixture in RAM, and those
that the user names."""

import re
from collections.abc import Mapping

from dflash_local.errors import InputError

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The part common to the names of experts' tensors: llama.cpp's `LLM_FFN_EXPS_REGEX`."""


def experts_of(n_layers: int) -> str:
    """The pattern of the experts of the first layers."""
    return rf"^blk\.({'|'.join(map(str, range(n_layers)))}){EXPERTS}"


def check_overrides(overrides: Mapping[str, str]) -> None:
    """Raises InputError for a pattern that is none in Python, or may be none in C++."""
    if not isinstance(overrides, Mapping):
        raise InputError(f"override_tensor is {overrides!r}, expected patterns with their devices")
    for pattern in overrides:
        try:
            re.compile(pattern)
            only_here = re.search(r"\(\?(?![:=!])", pattern)
        except re.error as error:
            raise InputError(f"override_tensor has the pattern {pattern!r}: {error}") from None
        if only_here:
            raise InputError(
                f"override_tensor has the pattern {pattern!r}: llama.cpp knows no group that "
                f"begins with {pattern[only_here.start() :][:3]!r}"
            )


def device_of(tensor: str, overrides: Mapping[str, str]) -> str | None:
    """The device that the user names for a tensor: the first pattern counts, as in llama.cpp."""
    return next((name for pattern, name in overrides.items() if re.search(pattern, tensor)), None)
