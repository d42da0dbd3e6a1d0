"""What every chunk and every body of an answer begins with."""

from __future__ import annotations

import hashlib
import secrets
import time
from importlib.metadata import version
from typing import Any

import dflash_local
from dflash_local.model import Model
from dflash_local.server.models.served import Served


def envelope(served: Served, kind: str, *, prefix: str) -> dict[str, Any]:
    """`kind` is the object's, such as `chat.completion`; `prefix` begins the id."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": system_fingerprint(served.model),
    }


def system_fingerprint(model: Model) -> str:
    """Another one where the same seed may give another answer: model, how it is loaded, versions.

    How many requests share the context is among it, and so is where the layers lie.
    """
    parts = (
        dflash_local.__version__,
        version("llama_cpp_python"),
        model.target.path.name,
        repr(model.target.options),
    )
    return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
