"""The memory that a conversion takes does not depend on the size of the drafter."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import hf_configs
import hf_drafters
from peak_memory import PEAK

CHILD = f"""{PEAK}
import json
from dflash_local.convert import convert
target, outtype, *folders = sys.argv[1:]
peaks = []
for folder in folders:
    convert(folder, target=target, outtype=outtype, output=folder + ".gguf")
    peaks.append(peak())
print(json.dumps(peaks))
"""
MB = 1 << 20


def write_zeros(folder: Path, n_ff: int) -> Path:
    """A drafter of one layer for the tiny target, its weights a hole in a file."""
    folder.mkdir()
    changes = {"intermediate_size": n_ff, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = hf_configs.config("plain", n_embd=512, n_vocab=8192) | changes
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, shape in hf_drafters.shapes("plain", n_embd=512, n_vocab=8192).items():
        if not name.startswith("layers.1."):
            sizes = [n_ff if size == hf_configs.N_FF else size for size in shape]
            end = offset + 2 * math.prod(sizes)
            header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no resource module")
@pytest.mark.parametrize("outtype", ["q8_0", "q4_k_m"])
def test_a_large_drafter_takes_no_more_memory_than_a_small_one(
    outtype: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Three tensors of 67 MB each, 134 MB as floats."""
    folders = [write_zeros(tmp_path / "small", 1024), write_zeros(tmp_path / "large", 65536)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(pair[0]), outtype, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    written = tmp_path / "large.gguf"
    assert written.stat().st_size > 50 * MB
    written.unlink()
    assert large - small < 64 * MB
    assert large < 1 << 30
