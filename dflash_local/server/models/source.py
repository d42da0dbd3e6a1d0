"""A model that can be served: its name, its files, and how to load them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dflash_local.errors import InputError
from dflash_local.fit.footprint import size_text
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.plan import Plan
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device
from dflash_local.llama.workers import remote_devices
from dflash_local.loading import Progress, load
from dflash_local.model import Model
from dflash_local.pair import Pair, open_pair
from dflash_local.pairs.defaults import Defaults, defaults_of
from dflash_local.pairs.gguf_names import is_shard
from dflash_local.server.models.recorder import Recorder
from dflash_local.setup import Setup


@dataclass(frozen=True)
class ModelSource:
    """What to load, and how.

    `options`: keyword arguments of `dflash_local.load`.
    `draft_width`: for requests that do not name one; None is the model's own.
    `max_queue`: how many requests may wait for a slot.
    `keep_alive_s`: seconds that the model stays loaded without requests; None is the server's.
    """

    name: str
    target: Path
    draft: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    draft_width: int | Literal["auto"] | None = None
    max_queue: int | None = None
    keep_alive_s: float | None = None
    thinking: bool | None = None
    """For chats that do not say; None is the pair's own."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """For requests that do not say, before what the model's makers advise."""
    max_tokens: int | None = None
    """The most tokens of an answer, whatever a request asks for."""
    chat_template: str | None = None
    """A Jinja template in place of the model's own."""
    recorder: Recorder | None = None
    """Keeps the prompts of its requests."""
    aliases: tuple[str, ...] = ()
    """All names that requests may give, if there are several."""
    tags: tuple[str, ...] = ()
    """What `/v1/models` tells of it beside."""

    def load(
        self, progress: Progress | None = None, is_alone: Callable[[], bool] = lambda: True
    ) -> Model:
        """Load it, ready for requests.

        `is_alone` tells whether no other request runs, so that a pause of the whole process would
        delay nobody. Raises what `dflash_local.load` raises.
        """
        model = load(
            self.target,
            self.draft,
            draft_width=self.draft_width,
            thinking=self.thinking,
            sampling=self.sampling,
            chat_template=self.chat_template,
            progress=progress,
            **self.options,
        )
        try:
            model.max_queue = self.max_queue
            with contextlib.suppress(InputError):  # chats will be told
                model.prepare_chat()
            # It holds up every running request, half a second for a large vocabulary. Where some
            # run, it is left to the first request that needs it.
            if is_alone():
                model.engine.grammars.prepare()
        except BaseException:
            model.close()
            raise
        return model

    @property
    def size(self) -> str:
        """The size of its file, for a line of progress: `(4.7 GiB) `; "" where it has several."""
        if is_shard(self.target.name):
            return ""
        try:
            return f"({size_text(self.target.stat().st_size)}) "
        except OSError:
            return ""

    @cached_property
    def defaults(self) -> Defaults:
        """How requests are answered that do not say; known before it is loaded. Raises FileError,
        OSError."""
        draft = GgufFile.open(self.draft) if self.draft else None
        return defaults_of(GgufFile.open(self.target), draft, self.thinking, self.sampling)

    def open(self) -> Pair:
        """Its files, checked. Raises FileError, PairError."""
        return open_pair(self.target, self.draft)

    def plan(self, pair: Pair, devices: Sequence[Device]) -> Plan:
        """What loading it on a machine with `devices` would take. Raises InputError."""
        options = LoadOptions(draft_width=self.draft_width, **self.options)
        return Setup(pair, options, [*remote_devices(options.rpc), *devices]).plan
