"""JSON objects of requests: those that say in ``type`` what they are, and those that are passed on as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from tercet_shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Collection


MAX_DEPTH = 100
"""Levels of objects and lists in one another: no schema needs them, and writers of JSON stop not far beyond."""


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise ValueError(f"More than {MAX_DEPTH} levels of objects and lists are not allowed")


JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""An object that is passed on."""


def kind_of(raw: Any) -> str | None:
    """Returns the ``type`` of a JSON object or of a model; None where there is none."""
    kind = raw.get("type") if isinstance(raw, dict) else getattr(raw, "type", None)
    return kind if isinstance(kind, str) else None


def refuse_kind(raw: Any, known: Collection[str], path: str, what: str) -> None:
    """Raises `InvalidRequestError` for a JSON object whose ``type`` is not known.

    What is no object, or has no type, is the schema's business.

    Args:
        raw: the JSON value.
        known: types that are built.
        path: of the value in the request.
        what: such values are, in the plural.
    """
    kind = kind_of(raw) if isinstance(raw, dict) else None
    if kind is not None and kind not in known:
        raise InvalidRequestError(f"{path}: {what} of type {kind[:100]!r} are not supported.", param=f"{path}.type")
