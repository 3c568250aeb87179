"""The OpenAPI document: endpoints read bodies and write answers themselves, so FastAPI does not see their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from tercet_frontend.api.errors import MESSAGES_PATH
from tercet_frontend.api.health import HEALTH_PATHS
from tercet_frontend.schemas.described import ANSWERS, ErrorAnswer, MessagesErrorAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI
    from pydantic import BaseModel
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema

_REF = "#/components/schemas/{model}"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


class _WithoutDefaults(GenerateJsonSchema):
    """Answers have no defaults: a field that is not required may be left out."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """Returns the part of a route's OpenAPI description that says what body it takes."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(schema)}}}}


def describe_bodies(app: FastAPI, schemas: Sequence[type[BaseModel]]) -> None:
    """Makes the OpenAPI document of ``app`` say what its operations take and answer.

    Args:
        app: every route that is in the document has its answer in `ANSWERS`.
        schemas: those to which `body_of` refers.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            answers: list[type[BaseModel]] = [model for pair in ANSWERS.values() for model in pair if model is not None]
            answers += [ErrorAnswer, MessagesErrorAnswer]
            _, taken = models_json_schema([(schema, "validation") for schema in schemas], ref_template=_REF)
            _, answered = models_json_schema(
                [(model, "validation") for model in dict.fromkeys(answers)],
                ref_template=_REF,
                schema_generator=_WithoutDefaults,
            )
            components = document.setdefault("components", {})
            components["schemas"] = {**taken["$defs"], **answered["$defs"]}
            components["securitySchemes"] = _KEYS
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _describe(operation, method, path)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the documented way to extend the document


def _describe(operation: dict[str, Any], method: str, path: str) -> None:
    answer, event = ANSWERS[method, path]
    content = {"application/json": {"schema": _reference(answer)}}
    if event is not None:
        # What is in the data of each event.
        content["text/event-stream"] = {"schema": _reference(event)}
    error = MessagesErrorAnswer if path.startswith(MESSAGES_PATH) else ErrorAnswer
    failed = {"description": "An error; the body says which.", "content": _json(error)}
    if path in HEALTH_PATHS:
        failed = {"description": "Not ready, or an error.", "content": _json(answer)}
    operation["responses"] = {"200": {"description": "The answer.", "content": content}, "default": failed}
    # Where the server has no keys, none is asked for.
    operation["security"] = [] if path in HEALTH_PATHS else [{}, *({name: []} for name in _KEYS)]


def _json(schema: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(schema)}}


def _reference(schema: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=schema.__name__)}
