"""Prompts of requests, kept in a file on this machine for `dflash-local tune`."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from dflash_local.errors import InputError
from dflash_local.target_model.images import without_images
from dflash_local.target_model.vocabulary import Vocabulary


class Recorder:
    """Adds a JSON object for each request to a file that only its owner can read: `prompt`, with
    the names of special tokens in it, the first one of every text included, and the model's name as
    `category`."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """`say` gets a line when prompts are lost, and one when they are kept again. Raises
        InputError if the file cannot be written, or others could read it."""
        self.path = path
        self._say = say
        self._n_lost = 0
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
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115  (as long as the server)

    def add(self, name: str, prompt: Sequence[int], vocabulary: Vocabulary) -> None:
        """Keep the prompt of a request to the model of that name. A disk that is full ends no
        answer."""
        text = vocabulary.detokenize(without_images(prompt), special=True)
        line = json.dumps({"prompt": text, "category": name, "add_special": False}) + "\n"
        raw = line.encode()
        with self._lock:
            end = self._file.seek(0, os.SEEK_END)
            try:
                if self._file.write(raw) < len(raw):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                with suppress(OSError):  # a line that is cut off could not be read
                    self._file.truncate(end)
                self._n_lost += 1
                if self._n_lost == 1:
                    self._say(f"{self.path}: {error.strerror}; prompts are not recorded for now")
                return
            if self._n_lost:
                self._say(f"{self.path}: prompts are recorded again; {self._n_lost} were not")
                self._n_lost = 0
