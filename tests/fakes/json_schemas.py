"""Schemas drawn at random, of which every text is short: strings, arrays and numbers have bounds."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "city", "age", "kind", "colour", "size", "tags", "note", "état", "名前", "price", "is ok?", 'say "so"')
PATTERNS = (r"^[a-z]{2,6}$", r"^[A-Z]{3}-[0-9]{2,4}$", "^(yes|no|perhaps)$", r"^\+?[0-9]{3,8}$", "^[äöü]{1,3}!?$")
VALUES = ("red", "dark green", "", "1", 1, 2.5, -3, None, True, "ünï", "😀", 'a "quote" \\ and a\nline')
FORMATS = ("date", "uuid", "ipv4", "email")
DEEPEST = 3


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema of at most `DEEPEST` levels; the outermost is an object, an array or a choice of schemas."""
    inner = ("object", "object", "array", "any of")
    outer = (
        "string",
        "enum",
        "pattern",
        "format",
        "integer",
        "number",
        "multiple",
        "boolean",
        "null",
        "const",
        "types",
    )
    kind = rng.choice(inner if not depth else inner + outer if depth < DEEPEST else outer)
    low = rng.randrange(3)
    match kind:
        case "object":
            return _object(rng, depth)
        case "array":
            items = random_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
        case "any of":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}
        case "string":
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 10)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 60}
        case "enum":
            return {"enum": rng.sample(VALUES, rng.randrange(1, 4))}
        case "const":
            return {"const": rng.choice((*VALUES, [1, "a"], {"a": None}, [], {}))}
        case "integer":
            least = rng.randrange(-200, 100)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(2_000)}
        case "number":
            least = rng.randrange(-5, 5)
            return {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): least, "maximum": least + 30}
        case "multiple":
            return {"type": "number", "multipleOf": rng.choice((0.01, 0.5, 5, 7)), "minimum": 0, "maximum": 1_000}
        case "types":
            return {"type": ["null", rng.choice(("boolean", "integer"))], "minimum": 0, "maximum": 9}
        case _:
            return {"type": kind}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
