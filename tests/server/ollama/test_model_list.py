"""What Ollama's clients are told of models that are not loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from dflash_local.server.app import create_app
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource
from gguf_files import UINT32, changed, small


def test_weights_that_are_not_quantised_have_ollama_s_name(tmp_path: Path) -> None:
    keys = {"general.file_type": (0, UINT32, None)}
    path = changed(small(tmp_path / "small.gguf"), tmp_path / "f32.gguf", keys=keys)
    app = create_app(ModelPool([ModelSource("m", path)]), ServerSettings())

    async def listed() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/api/tags")).json()

    (model,) = asyncio.run(listed())["models"]
    assert model["details"]["quantization_level"] == "F32"
