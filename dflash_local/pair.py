"""The files of a target and its drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dflash_local.draft.shape import DraftShape, checked_shape
from dflash_local.errors import PairError
from dflash_local.fit.architectures import RECURRENT_ARCHITECTURES
from dflash_local.fit.options import COPIES, HEADS, NONE, LoadOptions
from dflash_local.fit.pairing import check_heads, check_pair, check_target
from dflash_local.gguf.drafter_spec import AnySpec, HeadsSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device


@dataclass(frozen=True)
class Pair:
    """The files of a target and, if there is one, of a drafter that fits it: the target's own if it
    drafts with its heads. `copies`: copies were asked for in place of a drafter. `by_default`: no
    drafter was named, and the heads are used because the file has them."""

    target: GgufFile
    draft: GgufFile | None
    spec: AnySpec | None
    copies: bool = False
    by_default: bool = False

    @property
    def is_recurrent(self) -> bool:
        return self.target.architecture in RECURRENT_ARCHITECTURES

    def without_drafts(self) -> Pair:
        """The target by itself."""
        return replace(self, draft=None, spec=None, copies=False, by_default=False)

    def with_keys(self, keys: Mapping[str, int | float | bool | str]) -> Pair:
        """The same with other values for keys of the target's file. Raises as `open_pair` where the
        files do not go with them."""
        if not keys:
            return self
        target = replace(self.target, metadata={**self.target.metadata, **keys})
        check_target(target)
        if isinstance(self.spec, HeadsSpec):
            return replace(self, target=target, draft=target, spec=check_heads(target))
        spec = check_pair(target, self.draft) if self.draft else None
        return replace(self, target=target, spec=spec)


def usual_shape(devices: Sequence[Device], options: LoadOptions) -> DraftShape:
    """The draft shape of requests that name none.

    Without an option it is "auto" on a GPU, where more rows in a pass cost little. On a CPU it is
    "chain": each row costs nearly as much as a pass, and chains are exact to the bit there.
    """
    if options.draft_shape is not None:
        return checked_shape(options.draft_shape)
    if options.exact:
        return "chain"
    uses_gpu = options.n_gpu_layers != 0 and any(d.type in ("gpu", "igpu") for d in devices)
    return "auto" if uses_gpu else "chain"


def open_pair(target: str | os.PathLike[str], draft: str | os.PathLike[str] | None = None) -> Pair:
    """Check both files and whether they fit. Only headers are read. `draft` may be "copies", "mtp"
    or "none"; without it, a target drafts with its heads if its file has any that can be used.
    Raises FileError, PairError."""
    target_file = GgufFile.open(target)
    check_target(target_file)
    if draft is None:
        with suppress(PairError):
            return Pair(target_file, target_file, check_heads(target_file), by_default=True)
    word = NONE if draft is None else os.fspath(draft)
    if word in (COPIES, NONE):
        return Pair(target_file, None, None, copies=word == COPIES)
    if word == HEADS:
        return Pair(target_file, target_file, check_heads(target_file))
    draft_file = GgufFile.open(word)
    return Pair(target_file, draft_file, check_pair(target_file, draft_file))
