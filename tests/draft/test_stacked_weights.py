"""Weights that lie side by side where their types allow, and apart where not: the same drafts."""

from typing import Any

import pytest

from draft_twin import TwinMaker, make_twin

__all__ = ["make_twin"]


def of_layer(layer: int, *parts: str) -> dict[str, str]:
    return {f"blk.{layer}.{part}.weight": "F16" for part in parts}


QKV = ("attn_q", "attn_k", "attn_v")
# F16 beside F32: their products round alike, so that the tolerance is that of one type.
MIXES: dict[str, dict[str, Any]] = {
    "v of the first layer": {"mixed": of_layer(0, "attn_v")},
    "v of the last layer": {"mixed": of_layer(2, "attn_v")},
    "q and k of a layer between": {"mixed": of_layer(1, "attn_q", "attn_k")},
    "one layer": {"mixed": of_layer(1, *QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")},
    "the first layer": {"mixed": of_layer(0, *QKV)},
    "v of all layers": {
        "mixed": {k: t for i in range(3) for k, t in of_layer(i, "attn_v").items()}
    },
    "up of a layer": {"mixed": of_layer(1, "ffn_up")},
    "gate of the first layer": {"mixed": of_layer(0, "ffn_gate")},
    "fc": {"mixed": {"fc.weight": "F16"}},
    "biases, and v of a layer": {"mixed": of_layer(1, "attn_v"), "biases": ("q", "k", "v")},
    "biases, and one layer": {"mixed": of_layer(0, *QKV), "biases": ("q", "k", "v", "output")},
}
BIASES: dict[str, tuple[str, ...]] = {
    "of a layer between": ("1.q", "1.k", "1.v"),
    "of the last layer": ("2.q", "2.k", "2.v"),
    "of the first layer": ("0.q", "0.k", "0.v"),
    "of two layers": ("0.q", "0.k", "0.v", "2.q", "2.k", "2.v"),
    "of q in all layers": ("q",),
    "of k and v in one layer": ("1.k", "1.v"),
}


@pytest.mark.one_in(11)
@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES.keys())
def test_types_may_differ_between_tensors(options: dict[str, Any], make_twin: TwinMaker) -> None:
    twin = make_twin(n_layer=3, n_seq=2, **options)
    for rows in ({0: 37, 1: 3}, {0: 3}, {1: 70}, {0: 0, 1: 1}):
        twin.draft(rows)


@pytest.mark.parametrize("biases", BIASES.values(), ids=BIASES.keys())
def test_some_layers_may_have_biases(biases: tuple[str, ...], make_twin: TwinMaker) -> None:
    twin = make_twin(n_layer=3, biases=biases)
    for n_rows in (37, 3, 70):
        twin.draft({0: n_rows})


def test_quantised_types_may_differ(make_twin: TwinMaker) -> None:
    """As quantisers mix them: V of some layers in more bits than the rest."""
    twin = make_twin(
        n_embd=256,
        head_dim=64,
        n_layer=3,
        quant="Q4_K",
        mixed={"blk.0.attn_v.weight": "Q6_K", "blk.2.attn_v.weight": "Q8_0"},
    )
    for n_rows in (37, 3, 1):
        twin.draft({0: n_rows})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("n_vocab", [321, 333, 352, 384])
@pytest.mark.parametrize("top_k", [1, 8])
def test_any_vocabulary(n_vocab: int, top_k: int, make_twin: TwinMaker) -> None:
    """Whether or not it divides into the pieces that a device searches."""
    twin = make_twin(n_vocab=n_vocab, top_k=top_k)
    for n_rows in (12, 3):
        twin.draft({0: n_rows})
