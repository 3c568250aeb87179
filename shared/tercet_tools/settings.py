"""What the settings of the tools share: they are flags and variables like those of the services."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from tercet_shared.config import _Settings as ToolSettings


def _listed(value: object) -> object:
    """Returns the values of ``1,4`` or ``[1, 4]``; a flag that is given several times comes as a list of such texts."""
    if isinstance(value, str):
        return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",")]
    if isinstance(value, list):
        return [part for item in value for part in (item.split(",") if isinstance(item, str) else [item])]
    return value


Texts = Annotated[list[str], NoDecode, BeforeValidator(_listed)]
Integers = Annotated[list[int], NoDecode, BeforeValidator(_listed)]
Floats = Annotated[list[float], NoDecode, BeforeValidator(_listed)]
"""Several values: ``1,4,16``, or the flag repeated."""

__all__ = ["Floats", "Integers", "Texts", "ToolSettings"]
