"""No body costs more than a few errors to refuse: collecting them holds up all other clients."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from dflash_local.server import app  # all models are imported with it
from dflash_local.server.answering import bounds

MANY = 2000
FEW = 10

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


def models(of: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for kind in of.__subclasses__():
        yield kind
        yield from models(kind)


def test_a_bad_body_is_refused_at_its_first_faults() -> None:
    ours = {kind for kind in models(BaseModel) if kind.__module__.startswith(app.__package__)}
    assert len(ours) > 60
    for model in ours:
        needed = {name for name, field in model.model_fields.items() if field.is_required()}
        for name in model.model_fields:
            for value in HOSTILE:
                body = {**dict.fromkeys(needed, "x"), name: value}
                try:
                    model.model_validate(body)
                except ValidationError as error:
                    assert error.error_count() <= FEW, (model, name, value[:1])


def test_a_whole_number_may_have_a_point() -> None:
    """As the clients write it whose language has one kind of number."""
    known = TypeAdapter(bounds.MaxTokens)
    taken = known.validate_json("5.0")
    assert taken == 5 and type(taken) is int
    for refused in ("5.5", "true", '"5"', "0.0", "1e300", "1e400"):
        with pytest.raises(ValidationError):
            known.validate_json(refused)
