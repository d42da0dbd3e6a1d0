"""The settings for loading a pair, with defaults and ranges. None: the best fit."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from dflash_local.errors import InputError
from dflash_local.fit.overrides import check_overrides

if TYPE_CHECKING:
    from typing_extensions import Self

KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
SPLIT_MODES = ("layer", "row", "tensor", "none")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
"""llama.cpp's; `auto` maps the file where the devices allow it."""
ROPE_SCALINGS = ("none", "linear", "yarn")
ROPE_NUMBERS = (
    *("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
)
"""Fields of `llama_context_params`."""
SHAPES = ("chain", "tree", "auto")
COPIES = "copies"
"""In place of a drafter's file: only copies of the text are drafted."""
HEADS = "mtp"
"""In place of a drafter's file: the target's own heads, layers that predict further tokens."""
NONE = "none"
"""In place of a drafter's file: none, also where one lies beside the target."""
WORDS = (COPIES, HEADS, NONE)
AUTO = "auto"
"""In place of a projector's file: the one beside the target, fetched if it is missing."""
Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""The way in which the vectors of a text's tokens become one: not at all, their mean, that of the
first or of the last token, or a score of how well two texts fit, as rerankers have it."""

POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")
"""In the order of llama.cpp's `LLAMA_POOLING_TYPE_*`."""

MAX_CONTEXT = 1 << 24
MAX_IDS = 256
"""Sequence ids of a context: llama.cpp's limit (LLAMA_MAX_SEQ)."""

MAX_OUTPUT_ROWS = 64
"""The most rows of a batch, per sequence, that can have logits: the widest verify pass."""

MAX_ROWS_AT_HOME = 128
"""The same where experts are in RAM, unless results are to be exact: a row costs less the more
there are, as most read experts that others have read. Of gpt-oss-120b's shape beside an H100, each
of 8 rows took 0.8 plain steps, of 64 0.49, of 128 0.45."""

STORED_ROWS = 2 * MAX_OUTPUT_ROWS
"""Rows of each sequence whose hidden states wait for the drafter, besides those of a batch: those
of a verify pass, and some before it."""

MAX_COPY_FROM = 1 << 18
"""The most tokens of further text to copy from: each request takes their memory, 50 bytes for each,
and indexes them, a fiftieth of a second in all."""

COPY_SNAPSHOTS = 15
"""Snapshots of a recurrent state to copy with. More rows than 16 take more memory for states than
most contexts do for tokens."""

SNAPSHOT_ROWS = 2
"""Rows that a batch must hold beyond snapshots: llama.cpp asserts it at its first pass."""

SPARE_IDS = 2
"""More ids of a context with recurrent states on a CPU, if it has several slots: one keeps freed
cells taken, so that each slot's are in order, and one stays empty. Each id takes a state."""

CHECKPOINTS = 2
"""Of each recurrent state, on the host: at the ends of a slot's last two prompts. With only one, a
changed last turn would read the whole conversation again."""


Scaled = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
"""A file and how strongly it acts: "FILE", "FILE:SCALE", or both in a tuple."""

_MAX_SCALE = 1e4


class LoadSettings(TypedDict, total=False):
    """Keyword arguments of `dflash_local.load`, whose docstring explains them. `LoadOptions` has
    their defaults."""

    n_ctx: int | None
    n_gpu_layers: int | None
    cpu_moe: bool
    n_cpu_moe: int | None
    override_tensor: Mapping[str, str]
    n_threads: int | None
    n_batch: int
    flash_attn: bool
    kv_type: str
    cache_type_k: str | None
    cache_type_v: str | None
    override_kv: Mapping[str, int | float | bool | str]
    load_mode: str
    device: Sequence[str]
    rope_scaling: str | None
    rope_scale: float | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    yarn_ext_factor: float | None
    yarn_attn_factor: float | None
    yarn_beta_fast: float | None
    yarn_beta_slow: float | None
    yarn_orig_ctx: int | None
    split_mode: str
    main_gpu: int
    tensor_split: Sequence[float] | None
    n_seq: int
    draft_window: int | None
    draft_shape: str | None
    draft_width: int | Literal["auto"] | None
    cache_mb: int
    cache_dir: str | os.PathLike[str] | None
    slot_save_path: str | os.PathLike[str] | None
    exact: bool
    recalibrate: bool
    draft_from: str | os.PathLike[str] | None
    rpc: Sequence[str]
    lora: Sequence[Scaled]
    control_vectors: Sequence[Scaled]
    mmproj: str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """The settings of a load that the target's context takes over as they are."""

    n_threads: int | None = None
    n_batch: int = 512
    flash_attn: bool = True
    kv_type: str = "f16"
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    load_mode: str = "auto"
    device: Sequence[str] = ()
    rope_scaling: str | None = None
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: Sequence[float] | None = None
    n_seq: int = 1
    exact: bool = False
    rpc: Sequence[str] = ()
    override_tensor: Mapping[str, str] = field(default_factory=dict)
    override_kv: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    lora: Sequence[Scaled] = ()
    control_vectors: Sequence[Scaled] = ()

    def __post_init__(self) -> None:
        for name in ("lora", "control_vectors"):
            object.__setattr__(self, name, scaled_files(name, getattr(self, name)))
        check_whole("n_threads", self.n_threads, 1, 512)
        check_one_of("kv_type", self.kv_type, KV_TYPES)
        check_one_of("cache_type_k", self.kv_types[0], KV_TYPES)
        check_one_of("cache_type_v", self.kv_types[1], KV_TYPES)
        for kv_type in self.kv_types:
            if "q" in kv_type and not self.flash_attn:
                raise InputError(
                    f"kv_type {kv_type} needs flash attention; leave flash_attn on or take f16"
                )
        check_one_of("split_mode", self.split_mode, SPLIT_MODES)
        if isinstance(self.rpc, str):
            raise InputError(f"rpc is {self.rpc!r}, expected a list of HOST:PORT")
        if self.rpc and self.split_mode == "none":
            raise InputError("split_mode is 'none', with rpc: nothing would go to a worker")
        check_overrides(self.override_tensor)
        for key, value in self.override_kv.items():
            text = str(value)
            if type(value) not in (int, float, bool, str) or max(len(key), len(text)) > 120:
                raise InputError(
                    f"override_kv has {key}={text[:60]!r}: llama.cpp takes no such value"
                )
        check_one_of("load_mode", self.load_mode, LOAD_MODES)
        if self.rope_scaling is not None:
            check_one_of("rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        check_whole("yarn_orig_ctx", self.yarn_orig_ctx, 0, (1 << 31) - 1)
        for name in ("rope_scale", *ROPE_NUMBERS):
            _check_number(name, getattr(self, name))
        if self.rope_scale == 0 or None not in (self.rope_scale, self.rope_freq_scale):
            raise InputError("rope_scale is 1 / rope_freq_scale; give one of them, above 0")

    @property
    def bends_rope(self) -> bool:
        """Whether positions are to be read another way than the target's file says."""
        names = ("rope_scaling", "rope_scale", *ROPE_NUMBERS)
        return any(getattr(self, name) is not None for name in names)

    def for_drafter(self, *, is_recurrent: bool) -> Self:
        """The same for a drafter that is a model of its own: without the target's own, and with a
        sequence more for each to draft in, if it has a recurrent state."""
        own: dict[str, Any] = dict.fromkeys(("rope_scaling", "rope_scale", *ROPE_NUMBERS))
        own |= {"kv_type": "f16", "cache_type_k": None, "cache_type_v": None}
        own |= {"lora": (), "control_vectors": (), "override_tensor": {}, "override_kv": {}}
        n_seq = self.n_seq * (2 if is_recurrent else 1)
        return replace(self, n_seq=n_seq, exact=False, **own)

    @property
    def kv_types(self) -> tuple[str, str]:
        """Those of keys and of values."""
        return self.cache_type_k or self.kv_type, self.cache_type_v or self.kv_type


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ContextOptions):
    """The settings of `dflash_local.load`, whose docstring explains them."""

    n_ctx: int | None = None
    n_gpu_layers: int | None = None
    cpu_moe: bool = False
    n_cpu_moe: int | None = None
    draft_window: int | None = None
    draft_shape: str | None = None
    draft_width: int | Literal["auto"] | None = None
    cache_mb: int = 0
    cache_dir: str | os.PathLike[str] | None = None
    slot_save_path: str | os.PathLike[str] | None = None
    recalibrate: bool = False
    draft_from: str | os.PathLike[str] | None = None
    mmproj: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("n_ctx", self.n_ctx, 16 * (self.n_seq if self.exact else 1), MAX_CONTEXT)
        check_whole("n_gpu_layers", self.n_gpu_layers, -1, None)
        check_whole("n_cpu_moe", self.n_cpu_moe, 0, None)
        check_whole("n_seq", self.n_seq, 1, MAX_OUTPUT_ROWS if self.exact else MAX_IDS)
        check_whole("n_batch", self.n_batch, 1, 65536)
        check_whole("draft_window", self.draft_window, 0, MAX_CONTEXT)
        if (
            isinstance(self.cache_mb, bool)
            or not isinstance(self.cache_mb, int)
            or self.cache_mb < 0
        ):
            raise InputError(
                f"cache_mb is {self.cache_mb!r}; expected a whole number of MiB, 0 or more"
            )
        if self.draft_shape is not None:
            check_one_of("draft_shape", self.draft_shape, SHAPES)
        if self.exact and self.draft_shape not in (None, "chain"):
            raise InputError(
                f"trees round differently than plain decoding, and draft_shape is "
                f"{self.draft_shape!r}; for exact answers give 'chain'"
            )
        if self.draft_width != "auto":
            check_whole("draft_width", self.draft_width, 0, None)
        if self.cache_dir is not None and not self.cache_mb:
            raise InputError("cache_dir needs room in memory, too; give cache_mb, 1 or more")


def check_names(given: Iterable[str], known: Collection[str], owner: str, place: str) -> None:
    """Raises InputError for the first name that is not `known`, with the one that was meant, or
    else the `place` that has them all."""
    for name in sorted(given):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else place
            raise InputError(f"{name!r} is not an option of {owner}; {hint}")


def check_whole(name: str, value: Any, least: int, most: int | None) -> None:
    """Raises InputError unless `value` is a whole number in this range, or None."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected a whole number")
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise InputError(f"{name} is {value}, expected at least {least}{upper}")


def _check_number(name: str, value: Any) -> None:
    """Raises InputError unless `value` is a number of moderate size, 0 or more, or None; of YaRN
    also -1, which is the model's own."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_own = value == -1 and name.startswith("yarn_")
    if value is not None and not (is_number and (is_own or 0 <= value <= 1e9)):
        raise InputError(f"{name} is {value!r}, expected a number from 0 to 1e9")


def check_one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """Raises InputError unless `value` is one of these."""
    if value not in known:
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(known)}")


def scaled_files(name: str, given: Iterable[Scaled]) -> tuple[tuple[str, float], ...]:
    """Files and their scales, 1 where none is given. Raises InputError, which calls them `name`."""
    if isinstance(given, (str, os.PathLike)):
        raise InputError(f"{name} is {given!r}, expected a list of files")
    return tuple(_scaled(name, each) for each in given)


def _scaled(name: str, given: Scaled) -> tuple[str, float]:
    path, scale = given if isinstance(given, tuple) else (given, None)
    path = os.fspath(path)
    if scale is None:
        head, colon, tail = path.rpartition(":")
        try:
            path, scale = (head, float(tail)) if colon and head else (path, 1.0)
        except ValueError:
            scale = 1.0
    return path, checked_scale(f"the scale of {name} {path}", scale)


def checked_scale(name: str, scale: float) -> float:
    """The scale of an adapter. Raises InputError for anything but a number up to 10,000."""
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale) or abs(scale) > _MAX_SCALE:
        raise InputError(f"{name} is {scale!r}, expected a number up to {_MAX_SCALE:.0f}")
    return float(scale)
