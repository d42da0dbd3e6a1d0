"""Whole answers about pictures against llama-server's, over HTTP, with the same files.

`pytest -m peer` runs these. `LLAMA_SERVER` names the program; its ggml must be that of the
installed llama-cpp-python: kernels for other processors round otherwise.
"""

import os
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from dflash_local import load
from lab.bench.llama_server import LlamaServer
from vision_models import KINDS, asked, picture, write_projector, write_vision_target

N = 48


@pytest.mark.peer
@pytest.mark.parametrize("kind", KINDS)
def test_answers_about_pictures_are_llama_servers(kind: str, tmp_path: Path) -> None:
    target = write_vision_target(tmp_path / f"{kind}.gguf", kind)
    projector = write_projector(tmp_path / "mmproj.gguf", target)
    draft = "none" if kind == "qwen35" else tiny_coder.pair()[1]
    options: dict[str, Any] = {"n_ctx": 2048, "n_gpu_layers": 0, "n_threads": 1, "kv_type": "q8_0"}
    program = Path(os.environ["LLAMA_SERVER"])
    theirs = LlamaServer(program, target, None, projector=projector, **options)
    options |= {"mmproj": projector, "draft_shape": "chain", "quiet": True}
    with theirs, load(target, draft, **options) as ours:
        width = ours.engine.max_width if ours.drafter else 0
        for seed, size in enumerate(((64, 48), (256, 256), (96, 320))):
            messages = [asked("def add(a, b):", picture(*size, seed=seed))]
            for question in ("def sub(a, b):", None):
                expected = theirs.chat(messages, max_tokens=N)
                for draft_width in {0, width}:
                    result = ours.chat(
                        messages, max_tokens=N, temperature=0, draft_width=draft_width
                    )
                    assert result.content == expected
                messages.append({"role": "assistant", "content": expected})
                if question:
                    shown = picture(48, 48, seed=9), picture(90, 30, seed=seed)
                    messages.append(asked(question, *shown))
