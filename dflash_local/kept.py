"""What is measured once of a target on this machine and kept: under which name, and how written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_local import runtime
from dflash_local.target import Target


def key(target: Target, parts: Mapping[str, Any]) -> str:
    """Changes with `parts`, and with what decides how this machine computes a target."""
    whole = {
        "threads": target.n_threads,
        "build": runtime.llama_build(),
        "system": runtime.system_info(),
        "devices": [device.description for device in runtime.devices()],
        **parts,
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


def file_key(path: Path) -> list[str | int]:
    """Changes with the file."""
    stat = path.stat()
    return [os.fspath(path.resolve()), stat.st_size, stat.st_mtime_ns]


def write(place: Path, content: Any) -> None:
    """As JSON, whole or not at all. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(place)
