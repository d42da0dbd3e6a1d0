"""The way back of a context, of those its options ask for."""

import ctypes
from typing import Any

from dflash_local.fit.architectures import (
    CELLS,
    OWN_STATE_ARCHITECTURES,
    REPLAY_ARCHITECTURES,
    WayBack,
)
from dflash_local.llama import native
from dflash_local.llama.runtime import api
from dflash_local.target_model.replay import ReplayRollback
from dflash_local.target_model.rollback import Rollback, StateRollback


def has_states(model: Any) -> bool:
    """Whether a sequence of a model has a state that stands for all its tokens at once."""
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def keeps_checkpoints(model: Any) -> bool:
    """Whether a model has a recurrent state, of a kind whose checkpoints were tried."""
    return has_states(model) and _architecture(model) not in OWN_STATE_ARCHITECTURES


def possible(wanted: WayBack, model: Any, context: Any) -> WayBack:
    """The wanted way back, as far as llama.cpp and this build have it for a context."""
    if not has_states(model):
        return CELLS
    if n_snapshots := api.llama_n_rs_seq(context):  # 0 for architectures without any
        return WayBack("snapshots", n_snapshots)
    replays = _architecture(model) in REPLAY_ARCHITECTURES
    if wanted.by("replay") and replays and native.can_replay(native.address(context)):
        return wanted
    return CELLS


def rollback(way_back: WayBack, is_recurrent: bool, n_seq: int, passes: Any) -> Rollback:
    """The limits to which the sequences of a context with these passes can be cut."""
    if way_back.kind == "replay":
        return ReplayRollback(n_seq, passes)
    return StateRollback(n_seq, way_back.rows) if is_recurrent else Rollback()


def _architecture(model: Any) -> str:
    name = ctypes.create_string_buffer(64)
    api.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    return name.value.decode("utf-8", "replace")
