"""A model that can be served: its name, its files, and how to load them."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from dflash_local.drafter_choice import choose
from dflash_local.embedder import Embedder, load_embedder, plan_embedder
from dflash_local.errors import InputError
from dflash_local.fit.footprint import size_text
from dflash_local.fit.options import WORDS, LoadOptions, LoadSettings, Pooling
from dflash_local.fit.plan import Plan
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device
from dflash_local.llama.workers import remote_devices
from dflash_local.loading import Progress, load
from dflash_local.model import Model
from dflash_local.pair import open_pair
from dflash_local.pairs.defaults import Defaults, defaults_of
from dflash_local.pairs.find import PairFiles
from dflash_local.pairs.gguf_names import is_shard
from dflash_local.printable import silent
from dflash_local.server.models.recorder import Recorder
from dflash_local.setup import Setup

Use = Literal["chat", "embedding", "rerank"]
"""The use of a model: for texts, vectors or scores."""
_FOR_EMBEDDERS = ("n_ctx", "n_gpu_layers", "n_threads", "split_mode", "main_gpu", "tensor_split")


@dataclass(frozen=True)
class ModelSource:
    """The files and options to load a model from.

    `options`: keyword arguments of `dflash_local.load`. `max_queue`: the number of requests that
    may wait for a slot. `keep_alive_s`: seconds that the model stays loaded without requests; None
    is the server's.
    """

    name: str
    target: Path
    draft: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_queue: int | None = None
    keep_alive_s: float | None = None
    max_tokens: int | None = None
    """The most tokens of an answer, whatever a request asks for."""
    recorder: Recorder | None = None
    """Keeps the prompts of its requests."""
    aliases: tuple[str, ...] = ()
    """All names that requests may give, if there are several."""
    tags: tuple[str, ...] = ()
    """Further facts about it in `/v1/models`."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the loaded `Model`, for requests that do not say, such as `context_shift`."""
    pooling: Pooling | None = None
    """The way in which it makes vectors or scores of texts; None: it writes texts."""
    is_found: bool = False
    """Whether nobody named the drafter."""

    @property
    def use(self) -> Use:
        if self.pooling is None:
            return "chat"
        return "rerank" if self.pooling == "rank" else "embedding"

    def load(
        self, progress: Progress | None = None, is_alone: Callable[[], bool] = lambda: True
    ) -> Model | Embedder:
        """Load it, ready for requests.

        `is_alone` tells whether no other request runs, so that a pause of the whole process would
        delay nobody. Raises as `dflash_local.load`.
        """
        if self.pooling is not None:
            options = self._only(_FOR_EMBEDDERS)
            return load_embedder(self.target, pooling=self.pooling, **options)
        model = load(self._files, progress=progress, **self.options)
        try:
            model.max_queue = self.max_queue
            for name, value in self.usual.items():
                setattr(model, name, value)
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
        """The size of its file, for a line of progress: `(4.7 GiB) `; "" if it has several."""
        if is_shard(self.target.name):
            return ""
        try:
            return f"({size_text(self.target.stat().st_size)}) "
        except OSError:
            return ""

    @cached_property
    def defaults(self) -> Defaults:
        """The defaults of requests; known before it is loaded. Raises FileError, OSError."""
        is_file = self.draft is not None and str(self.draft) not in WORDS
        draft = GgufFile.open(self.draft) if self.draft and is_file else None
        given = self._only(("thinking", "sampling"))
        return defaults_of(GgufFile.open(self.target), draft, **given)

    def planner(self) -> Callable[[Sequence[Device]], Plan]:
        """A function that plans loading it on a machine's devices, or raises InputError. Its files
        are checked: raises FileError, PairError."""
        if self.pooling is not None:
            options = LoadOptions(**self._only(_FOR_EMBEDDERS))
            return partial(plan_embedder, GgufFile.open(self.target), self.pooling, options)
        options = LoadOptions(**self._only(LoadSettings.__annotations__))
        files, _ = choose(self._files, options, silent, None)
        pair = open_pair(files.target, files.draft)
        return lambda devices: (
            Setup(pair, options, [*remote_devices(options.rpc), *devices]).fitting().plan
        )

    @property
    def _files(self) -> PairFiles:
        return PairFiles(self.target, self.draft, self.is_found)

    def _only(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.options[name] for name in names if name in self.options}
