"""Request bodies in the OpenAPI document: endpoints read them themselves, so FastAPI does not see their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI
    from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """Returns the part of a route's OpenAPI description that says what body it takes."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def describe_bodies(app: FastAPI, schemas: Sequence[type[BaseModel]]) -> None:
    """Makes the OpenAPI document of ``app`` define the schemas to which `body_of` refers."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema([(schema, "validation") for schema in schemas], ref_template=_REF)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the documented way to extend the document
