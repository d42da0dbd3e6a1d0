"""The memory that a conversion takes does not depend on the size of the drafter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hf_configs
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
    config = hf_configs.VARIANTS["plain"](512, 8192) | changes
    (folder / "config.json").write_text(json.dumps(config))
    width, inner = hf_configs.N_HEAD * hf_configs.HEAD_DIM, hf_configs.N_HEAD_KV * 16
    shapes = {
        "fc.weight": (512, 1536),
        "hidden_norm.weight": (512,),
        "norm.weight": (512,),
        "layers.0.input_layernorm.weight": (512,),
        "layers.0.post_attention_layernorm.weight": (512,),
        "layers.0.self_attn.q_proj.weight": (width, 512),
        "layers.0.self_attn.k_proj.weight": (inner, 512),
        "layers.0.self_attn.v_proj.weight": (inner, 512),
        "layers.0.self_attn.o_proj.weight": (512, width),
        "layers.0.self_attn.q_norm.weight": (16,),
        "layers.0.self_attn.k_norm.weight": (16,),
        "layers.0.mlp.gate_proj.weight": (n_ff, 512),
        "layers.0.mlp.up_proj.weight": (n_ff, 512),
        "layers.0.mlp.down_proj.weight": (512, n_ff),
    }
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * shape[0] * (shape[1] if shape[1:] else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
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
