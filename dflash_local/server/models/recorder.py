"""Prompts of requests, kept in a file on this machine for `dflash-local tune`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from dflash_local.errors import InputError
from dflash_local.target.vocabulary import Vocabulary


class Recorder:
    """Adds a JSON object for each request to a file that only its owner can read: `prompt`, with
    the names of special tokens in it, the first one of every text included, and the model's name as
    `category`."""

    def __init__(self, path: Path) -> None:
        """Raises InputError if the file cannot be written, or others could read it."""
        self.path = path
        self._lock = Lock()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            if hasattr(os, "fchmod"):  # the file may have been there
                os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise InputError(
                f"--record {path}: cannot be written by this user alone: {error.strerror}; choose "
                "another file"
            ) from None
        self._file = open(descriptor, "a", encoding="utf-8")  # noqa: SIM115  (as long as the server)

    def add(self, name: str, prompt: Sequence[int], vocabulary: Vocabulary) -> None:
        """Keep the prompt of a request to the model of that name. A disk that is full ends no
        answer."""
        text = vocabulary.detokenize(prompt, special=True)
        line = json.dumps({"prompt": text, "category": name, "add_special": False}) + "\n"
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError:
                return
