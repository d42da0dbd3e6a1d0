"""Kinds of drafters by name: options of `write_drafter`."""

from collections.abc import Mapping
from typing import Any

from synthetic import Markov, Selector

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.freq_base": 10000.0,
}
CAPPED = {"extra": {"logit_scale": 0.5, "final_logit_softcapping": 8.0}}
# What drafts a position by itself.
COMMON: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "4 taps, block of 16": {"target_layers": (1, 2, 3, 4), "n_layer": 3, "block_size": 16},
    "one head of keys": {"n_head": 8, "n_head_kv": 1, "head_dim": 32},
    "window in some layers": {"sliding_window": 10, "n_layer": 3, "pattern": (True, False, True)},
    "window inside the block": {"sliding_window": 3},
    "own ends": {"own_head": True, "own_embeddings": True},
    "own embeddings, tied": {"own_embeddings": True},
    "own head": {"own_head": True},
    "norms after": {"post_norms": True},
    "scale of a layer": {"layer_scale": True},
    "half of a head rotated": {"rope_dimensions": 8},
    "rope factors": {"rope_factors": True},
    "linear rope scaling": {"extra": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "yarn": {"extra": YARN},
    "rope magnitude": {"extra": YARN | {"rope.scaling.attn_factor": 1.3}},
    "gelu": {"extra": {"hidden_activation": "gelu"}},
    "scale of embeddings": {"extra": {"embedding_scale": 3.0}},
    "scale of scores": {"extra": {"attention.scale": 0.4}},
    "scale of attention": {"extra": {"attention.value_scale": 0.4}},
    "scale and cap of logits": CAPPED,
}
# The same, in layouts of few drafters.
ALONE: dict[str, Mapping[str, Any]] = {
    "attention sinks": {"sinks": True},
    "values from keys": {"shared_kv": True},
    "causal": {"extra": {"attention.causal": True}},
    "reduced vocabulary": {"reduced_vocabulary": 100},
}
DSPARK: dict[str, Mapping[str, Any]] = {
    "from the anchor": {"markov": Markov()},
    "from the anchor, said": {"markov": Markov(rank=4, sample_from_anchor=True)},
    "from the masks": {"markov": Markov(sample_from_anchor=False), "block_size": 5},
    "no confidence": {"markov": Markov(confidence=False), "sliding_window": 6},
    "reduced vocabulary": {"markov": Markov(), "reduced_vocabulary": 100},
}
DFLASH2: dict[str, Mapping[str, Any]] = {
    "plain": {"selector": Selector()},
    "wide kernels": {"selector": Selector(kernel_size=9, group_size=1), "block_size": 5},
    "one candidate": {"selector": Selector(top_k=1, kernel_size=1)},
    "capped logits, three layers": {"selector": Selector(rank=16, top_k=7), "n_layer": 3, **CAPPED},
}
