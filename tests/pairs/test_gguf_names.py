"""The meaning of the names of GGUF files."""

import pytest

from dflash_local.errors import InputError
from dflash_local.pairs import gguf_names

NAMES = [
    "README.md",
    "mmproj-F16.gguf",
    "imatrix.gguf",
    "Model-Q4_K_M.gguf",
    "Model-128K-Q4_K_M.gguf",
    "Model-UD-IQ2_XXS.gguf",
    "model-mxfp4.gguf",
    "Q8_0/Model-Q8_0-00001-of-00002.gguf",
    "Q8_0/Model-Q8_0-00002-of-00002.gguf",
    "BF16/Model-BF16-00001-of-00003.gguf",
    "BF16/Model-BF16-00003-of-00003.gguf",
    "dflash-Model-Q8_0.gguf",
    "model-dflash-b16-bf16.gguf",
    "Model-DFlash2-Q4_0.gguf",
    "DSpark-F16.gguf",
]


def test_each_model_of_a_repository_is_found_once() -> None:
    assert gguf_names.targets(NAMES) == {
        "MXFP4": ["model-mxfp4.gguf"],
        "Q4_K_M": ["Model-Q4_K_M.gguf"],
        "UD-IQ2_XXS": ["Model-UD-IQ2_XXS.gguf"],
        "Model-128K-Q4_K_M": ["Model-128K-Q4_K_M.gguf"],
        "Q8_0": ["Q8_0/Model-Q8_0-00001-of-00002.gguf", "Q8_0/Model-Q8_0-00002-of-00002.gguf"],
    }, "a model that lacks a shard cannot be loaded, nor a projector"


def test_drafters_are_known_by_their_names() -> None:
    assert gguf_names.drafters(NAMES) == {
        "F16": ["DSpark-F16.gguf"],
        "Q8_0": ["dflash-Model-Q8_0.gguf"],
        "BF16": ["model-dflash-b16-bf16.gguf"],
        "Q4_0": ["Model-DFlash2-Q4_0.gguf"],
    }


@pytest.mark.parametrize(
    ("asked", "usual", "expected"),
    [
        (None, (), "Q4_K_M"),
        (None, ("MXFP4",), "MXFP4"),
        (None, ("Q2_K", "Q8_0"), "Q8_0"),
        (None, ("Q2_K",), "Q4_K_M"),
        ("q8_0", ("MXFP4",), "Q8_0"),
        ("IQ2_XXS", (), "UD-IQ2_XXS"),
        ("BF16", (), None),
    ],
)
def test_which_is_taken(asked: str | None, usual: tuple[str, ...], expected: str | None) -> None:
    assert gguf_names.choose(gguf_names.targets(NAMES), asked, usual) == expected


def test_one_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"lab/Model: holds no BF16; it has .*Q4_K_M"):
        gguf_names.chosen(gguf_names.targets(NAMES), "BF16", "lab/Model")
    with pytest.raises(InputError, match="lab/Model: holds no GGUF model"):
        gguf_names.chosen({}, None, "lab/Model")
