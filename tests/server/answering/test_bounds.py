"""No body costs more than a few errors to refuse: collecting them holds up all other clients."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dflash_local.server.answering import infill_prompt, sampling_fields
from dflash_local.server.anthropic import schema as anthropic
from dflash_local.server.llama import schema as llama
from dflash_local.server.ollama import schema as ollama
from dflash_local.server.openai import chat_schema, completions_schema, responses_schema

MANY = 2000
FEW = 10

MODULES = [
    anthropic,
    chat_schema,
    completions_schema,
    infill_prompt,
    llama,
    ollama,
    responses_schema,
    sampling_fields,
]

TEXT = {"role": "user", "content": "x"}

HOSTILE: list[Any] = [
    [-1] * MANY,
    [{}] * MANY,
    [[]] * MANY,
    ["x"] * MANY,
    [None] * MANY,
    ["x", -1] * MANY,
    [[-1] * 50] * 50,
    [["x", -1] * 50] * 50,
    dict.fromkeys(map(str, range(MANY)), "x"),
    {str(i): {} for i in range(MANY)},
    [{"type": "text"}] * MANY,
    [{"type": "function"}] * MANY,
    [{"role": "user"}] * MANY,
    [{"role": "user", "content": -1}] * MANY,
    [{"type": "message", "role": "user", "content": -1}] * MANY,
    [{"role": "user", "content": [{"type": "text"}] * 50}] * 50,
    [{"role": "user", "content": [-1] * 50}] * 50,
    [{**TEXT, "role": "assistant", "tool_calls": [{}] * 50}] * 50,
    [{**TEXT, "role": "tool", "content": [{}] * 50}] * 50,
]


def models(module: ModuleType) -> list[type[BaseModel]]:
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    return [kind for kind in found if issubclass(kind, BaseModel) and kind is not BaseModel]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_bad_body_is_refused_at_its_first_faults(module: ModuleType) -> None:
    for model in models(module):
        needed = {name for name, field in model.model_fields.items() if field.is_required()}
        for name in model.model_fields:
            for value in HOSTILE:
                body = {**dict.fromkeys(needed, "x"), name: value}
                try:
                    model.model_validate(body)
                except ValidationError as error:
                    assert error.error_count() <= FEW, (model, name, value[:1])
