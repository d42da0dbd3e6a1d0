"""A drafter has the tensors of its family, in the shapes that its keys give them."""

import pytest

import tiny_coder
from dflash_local.errors import FileError
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from gguf_files import edited


@pytest.fixture(scope="module")
def shipped() -> GgufFile:
    return GgufFile.open(tiny_coder.pair()[1])


def test_optional_tensors_are_taken(shipped: GgufFile) -> None:
    more = {
        "rope_freqs.weight": ("F32", (32,)),
        "blk.0.post_attention_norm.weight": ("F32", (512,)),
        "blk.0.layer_output_scale.weight": ("F32", (1,)),
        "blk.0.attn_q.bias": ("F32", (512,)),
    }
    spec = read_drafter(edited(shipped, tensors=more))
    assert spec.attention_bias


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("blk.1.attn_v.weight", None, "tensor blk.1.attn_v.weight is missing"),
        ("output_norm.weight", ("F32", (511,)), "has the shape [511], expected [512]"),
        ("output_norm.weight", ("F16", (512,)), "has the type F16, expected F32"),
        ("fc.weight", ("I8", (1536, 512)), "has the type I8, expected a weight type"),
        ("blk.1.attn_q.bias", ("F32", (96,)), "has the shape [96], expected [512]"),
        ("blk.0.markov_w1.weight", ("F32", (8, 8192)), "unknown to us"),
        ("markov_w2.weight", ("F32", (8, 8192)), "no place in a drafter of the family dflash"),
        ("blk.1.attn_conv_base", ("F32", (512, 3, 2)), "belongs to another family"),
        (
            "output_hc_scale.weight",
            ("F32", (32,)),
            "(hyper-connections), which this version does not run",
        ),
        (
            "blk.1.something.weight",
            ("F32", (32,)),
            "unknown to us, which this version does not run",
        ),
    ],
)
def test_a_bad_tensor(
    shipped: GgufFile, name: str, tensor: tuple[str, tuple[int, ...]] | None, reason: str
) -> None:
    with pytest.raises(FileError) as caught:
        read_drafter(edited(shipped, tensors={name: tensor}))
    assert reason in str(caught.value) and name in str(caught.value)
