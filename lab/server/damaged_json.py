"""Random damage to values of JSON."""

import copy
import random
from typing import Any

from damage import HOSTILE

_MOST = 10_000  # characters or values of what is made larger, or memory would not suffice


def damaged_value(value: Any, rng: random.Random) -> Any:
    """A value of JSON with a few parts replaced, left out, repeated, nested, or put in."""
    holder = [copy.deepcopy(value)]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, key = rng.choice(_places(holder))
        match rng.randrange(8):
            case 0 | 1:
                at[key] = _hostile(rng)
            case 2 if at is not holder:
                del at[key]
            case 3:
                for _ in range(rng.choice([1, 2, 40])):
                    at[key] = [at[key]] if rng.random() < 0.5 else {"a": at[key]}
            case 4:
                at[key] = _larger(at[key], rng)
            case 5 if isinstance(at, dict):
                at[rng.choice(["unknown", "", "\x00", key.upper()])] = copy.deepcopy(at[key])
            case 6 if isinstance(at, dict):
                at[rng.choice(sorted(at))] = copy.deepcopy(at[key])
            case 7 if isinstance(at[key], str):
                at[key] = at[key][: rng.randrange(len(at[key]) + 1)]
    return holder[0]


def _places(holder: list[Any]) -> list[tuple[Any, Any]]:
    """Every list and object in it, with every index and key."""
    found: list[tuple[Any, Any]] = []
    left: list[Any] = [holder]
    while left:
        at = left.pop()
        keys: Any = at if isinstance(at, dict) else range(len(at))
        found += ((at, key) for key in keys)
        left += (at[key] for key in keys if isinstance(at[key], (list, dict)))
    return found


def _hostile(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(HOSTILE))


def _larger(value: Any, rng: random.Random) -> Any:
    match value:
        case bool() | None:
            return _hostile(rng)
        case int() | float():
            return value * rng.choice([-1, 10, 1e9, 1e300])
        case str() | list() if len(value) > _MOST:
            return value
        case str():
            return value * rng.choice([2, 30, 1000])
        case list():
            return [copy.deepcopy(each) for each in value * rng.choice([2, 30, 1000])]
        case _:
            return value | {f"field {i}": i for i in range(rng.choice([1, 30, 1000]))}
