"""Hidden states at the rows of an image, which the drafter gets: those of a reference in PyTorch,
which is given the rows that libmtmd makes of the picture."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adversarial import ScriptedDrafter, oracle
from dflash_local.engine.slots import Slots
from dflash_local.target_model.images import Embeddings, Image, ids_of
from dflash_local.target_model.projector import Projector
from dflash_local.target_model.target import Target
from gguf_files import parts, write
from target_reference import REFERENCES, Rows
from vision_models import KINDS, N_DEEPSTACK, picture, write_projector, write_vision_target

TAPPED = (2, 3, 5)

torch.set_num_threads(1)  # the products are small


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_taps_at_an_image_are_the_references(kind: str, tmp_path: Path) -> None:
    reference = REFERENCES[kind](_exact(tmp_path, kind))
    with _opened(tmp_path) as target:
        before, after = (target.vocabulary.tokenize(text) for text in ("def add", "(a, b):"))
        begin = len(before)
        image, seen = _seen(tmp_path, target, begin)
        end = begin + image.n_positions
        target.decode(before, range(begin), [0] * begin, [False] * begin)
        taps = [target.stored(target.feature_rows)]
        target.decode_image(0, begin, seen, range(len(seen.rows)), image.n_positions)
        taps.append(target.stored(target.feature_rows))
        n = len(after)
        target.decode(after, range(end, end + n), [0] * n, [False] * n)
        taps.append(target.stored(target.feature_rows))
    size, n_rows = reference.n_embd, len(seen.rows)
    assert seen.is_causal != kind.startswith("gemma")
    shown = torch.from_numpy(seen.rows).double()
    values = torch.cat((reference.embedding(before), shown[:, :size], reference.embedding(after)))
    rows = Rows(values, _positions(begin, seen.positions, end, n), range(begin, begin + n_rows))
    if kind == "qwen3vl":
        rows.added = torch.zeros(N_DEEPSTACK, len(values), size, dtype=torch.float64)
        deeper = shown[:, size:].view(n_rows, N_DEEPSTACK, size)
        rows.added[:, begin : begin + n_rows] = deeper.transpose(0, 1)
    expected = reference.taps(rows, TAPPED).flatten(1).numpy()
    assert np.abs(np.concatenate(taps) - expected).max() <= 1e-3  # 2e-4 was seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["qwen3vl", "qwen35"])
def test_the_drafter_gets_a_row_for_each_position(kind: str, tmp_path: Path) -> None:
    """Also where several passes decode an image."""
    _exact(tmp_path, kind)
    with _opened(tmp_path) as target:
        image, seen = _seen(tmp_path, target, 0)
        n, n_rows = image.n_positions, image.n_rows
        assert n < n_rows
        target.decode_image(0, 0, seen, range(n_rows), n)
        expected = target.stored(target.feature_rows)[[i * n_rows // n for i in range(n)]]
    with _opened(tmp_path, n_batch=n_rows // 3) as target:
        slots = Slots(target, ScriptedDrafter(oracle(())), 1)
        slots.decode_image(slots[0], seen, ids_of(b"", n, n_rows - n), features=True)
        found = np.asarray(slots.take_features(slots[0]))
    assert np.abs(found - expected).max() <= 1e-3


def _exact(folder: Path, kind: str) -> Path:
    """A target without quantised weights, which no reference would round alike, and its
    projector."""
    keys, tensors = parts(write_vision_target(folder / "quantised.gguf", kind))
    f32 = gguf.GGMLQuantizationType.F32
    exact = {
        name: (gguf.quants.dequantize(data, kind).astype(np.float32), f32)
        for name, (data, kind) in tensors.items()
    }
    path = write(folder / "target.gguf", keys, exact)
    write_projector(folder / "mmproj.gguf", path)
    return path


def _opened(folder: Path, n_batch: int = 512) -> Target:
    # Flash attention would round keys and values to 16 bits.
    return Target.load(
        folder / "target.gguf",
        n_ctx=512,
        n_batch=n_batch,
        kv_type="f32",
        flash_attn=False,
        tapped_layers=TAPPED,
    )


def _seen(folder: Path, target: Target, begin: int) -> tuple[Image, Embeddings]:
    projector = Projector(folder / "mmproj.gguf", target)
    (image,) = projector.read(picture(96, 64)).images.values()
    return image, image.embeddings(begin).result()


def _positions(begin: int, image: NDArray[np.int32], end: int, n_after: int) -> torch.Tensor:
    """Those of time, height and width, [3, n], of a text with an image."""
    before, after = torch.arange(begin), torch.arange(end, end + n_after)
    shown = torch.from_numpy(image[:3]).expand(3, -1)
    return torch.cat((before.expand(3, -1), shown, after.expand(3, -1)), 1)
