"""An answer that follows a JSON schema, drafts included.

python examples/json_schema.py
"""

from __future__ import annotations

import json

import dflash_local

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        "pure": {"type": "boolean"},
    },
    "required": ["name", "arguments", "pure"],
    "additionalProperties": False,
}


def main() -> None:
    with dflash_local.load("smollm2-135m", quiet=True) as model:
        prompt = "# A function, described in JSON: "
        result = model.generate(prompt, json_schema=SCHEMA, max_tokens=128)
        print(json.dumps(json.loads(result.text), indent=2))


if __name__ == "__main__":
    main()
