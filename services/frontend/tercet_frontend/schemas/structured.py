"""What an answer must look like, as clients say it: OpenAI's ``response_format``, and vLLM's two ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from pydantic import Field, model_validator

from tercet_frontend.schemas.unbuilt import STRUCTURED_OUTPUTS, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError
from tercet_shared.structured import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_CHOICES = 4_096
"""Strings of which an answer can be made to be one."""

Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
"""Strings, one of which is the answer."""

ANY_OBJECT = '{"type":"object"}'
"""The schema of any JSON object."""


class JsonSchema(Strict):
    """A JSON schema with a name. It is enforced whether ``strict`` is set or not."""

    name: Text | None = None
    description: Text | None = None
    json_schema: dict[str, Any] = Field(alias="schema", description="An object.")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format.json_schema belongs to the type json_schema, which needs it.",
                param="response_format.json_schema",
            )
        return self


class StructuredOutputs(Strict):
    """vLLM's way; exactly one of them."""

    json_schema: dict[str, Any] | Text | None = Field(None, alias="json", description="A JSON schema.")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="A grammar in GBNF, or in llguidance's dialect of Lark.")
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            refuse_unbuilt(raw, STRUCTURED_OUTPUTS, "structured_outputs.")
        return raw


def grammar_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> Grammar | None:
    """Returns the grammar that a request asks for, or None.

    Args:
        response_format: the field of that name.
        structured: ``structured_outputs``.
        guided: the fields ``guided_json`` … under the names of ``structured_outputs``.

    Raises:
        InvalidRequestError: it asks for several, or one is empty, too large or no schema.
    """
    found: list[Grammar] = []
    if response_format is not None and response_format.type != "text":
        text = ANY_OBJECT
        if response_format.json_schema is not None:
            text = _schema(response_format.json_schema.json_schema, "response_format")
        found.append(Grammar(GrammarKind.JSON_SCHEMA, text, "response_format"))
    if structured is not None:
        fields = {name: getattr(structured, name) for name in type(structured).model_fields}
        own = _grammars(fields | {"json": structured.json_schema}, "structured_outputs.")
        if not own:
            raise InvalidRequestError(
                "structured_outputs must have one of json, regex, choice, grammar and json_object.",
                param="structured_outputs",
            )
        found += own
    found += _grammars(guided, "guided_")
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise InvalidRequestError(f"Only one of {names} can be given.", param=found[1].param)
    found[0].check()
    return found[0]


def _grammars(fields: Mapping[str, Any], prefix: str) -> Sequence[Grammar]:
    """Returns the grammars in ``fields``, whose names in the request have ``prefix``."""
    found: list[Grammar] = []

    def add(kind: GrammarKind, text: str, name: str) -> None:
        found.append(Grammar(kind, text, prefix + name))

    if (schema := fields.get("json")) is not None:
        add(GrammarKind.JSON_SCHEMA, _schema(schema, f"{prefix}json"), "json")
    if (regex := fields.get("regex")) is not None:
        add(GrammarKind.REGEX, regex, "regex")
    if (choice := fields.get("choice")) is not None:
        add(GrammarKind.CHOICE, orjson.dumps(choice).decode(), "choice")
    if (grammar := fields.get("grammar")) is not None:
        # Every rule of GBNF has this sign, and Lark has it nowhere but in strings.
        add(GrammarKind.EBNF if "::=" in grammar else GrammarKind.LARK, grammar, "grammar")
    if fields.get("json_object"):
        add(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "json_object")
    return found


def _schema(schema: dict[str, Any] | str, param: str) -> str:
    """Returns a schema as JSON text; vLLM's clients may send it as text."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError:
            raise InvalidRequestError(f"{param} is not valid JSON.", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param} must be a JSON schema, an object.", param=param)
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:
        raise InvalidRequestError(f"{param} is nested too deeply.", param=param) from None
