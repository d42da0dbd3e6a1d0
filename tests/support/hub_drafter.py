"""A drafter as a hub repository holds it."""

from __future__ import annotations

import torch
from safetensors.torch import save

DRAFTER = "lab/Tiny-DFlash"
CARD = """---
license: mit
base_model: lab/Tiny-Base
tags: [dflash]
---
# Tiny

This model is the **drafter** component. It must be used in conjunction with the target model
`lab/Tiny`. It was trained with a context length of 4096 tokens.
"""
WEIGHTS = save({"fc.weight": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)})


def drafter_files() -> dict[str, bytes]:
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": CARD.encode(),
        "config.json": b'{"model_type": "qwen3"}',
        "model.safetensors": WEIGHTS,
        "modeling_dflash.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "assets/picture.png": b"png",
    }
