"""From JSON to a checked request: strict types, and errors that name the field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from tercet_shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T", bound=BaseModel)


class Strict(BaseModel):
    """Base of all request models: no coercion ("1" is no number, true no integer), unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, hide_input_in_errors=True, protected_namespaces=()
    )


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("The NUL character is not allowed")
    return text


Text = Annotated[str, AfterValidator(_without_nul)]
"""A string as clients may send it. Lone surrogates cannot occur: the JSON parser refuses them."""


def validate(kind: type[T], raw: dict[str, Any]) -> T:
    """Returns ``raw`` as a checked ``kind``.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; ``param`` is its path, as
            ``messages[0].content``. The value itself is not repeated.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        # A union reports one error per member; the one that got furthest into the value is about what was meant. Of
        # those, one that found the right type and a wrong value.
        entries = [(_path(raw, entry["loc"]), not entry["type"].endswith("_type"), entry["msg"]) for entry in found]
        path, _, message = max(entries, key=lambda entry: (len(entry[0]), entry[1]))
        param = _written(path)
        text = _said(message)
        raise InvalidRequestError(f"{param}: {text}." if param else f"{text}.", param=param or None) from None


def _said(message: str) -> str:
    """Returns Pydantic's words without what only its users understand."""
    text = message.removeprefix("Value error, ").replace(" after validation", "")
    return re.sub(r"valid dictionary( or instance of \w+)?", "JSON object", text)


def _path(raw: object, location: Sequence[str | int]) -> list[str | int]:
    """Returns the keys and indices in ``location``, without the names of union members that Pydantic mixes in."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(raw, dict) and (part in raw or last):  # the last one may be the field that is missing
            path.append(part)
            raw = raw.get(part)
        elif isinstance(raw, list) and isinstance(part, int) and part < len(raw):
            path.append(part)
            raw = raw[part]
    return path


def _written(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
