"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from tercet_frontend.schemas.common import GenerationFields
from tercet_frontend.schemas.unbuilt import COMPLETION, refuse_unbuilt
from tercet_shared.errors import InvalidRequestError

MAX_PROMPTS = 1_024
MAX_CHOICES = 1_024
"""Choices of one request, over all its prompts."""

Prompt = str | list[int]
"""One prompt, as text or as token ids (integers; their range is checked where the vocabulary is known)."""


def _prompts(raw: Any) -> tuple[Prompt, ...]:
    """Returns the prompts in any of the four forms. By hand: Pydantic's unions report an error per element and form."""
    if isinstance(raw, str):
        return (_prompt(raw, "prompt"),)
    if not isinstance(raw, list) or not raw:
        raise _wrong("prompt")
    if type(raw[0]) is int:
        return (_prompt(raw, "prompt"),)
    if len(raw) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: at most {MAX_PROMPTS} prompts are allowed.", param="prompt")
    prompts = tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(raw))
    if len({type(prompt) for prompt in prompts}) > 1:
        raise _wrong("prompt")
    return prompts


def _prompt(raw: Any, path: str) -> Prompt:
    if isinstance(raw, str):
        if "\0" in raw:
            raise InvalidRequestError(f"{path}: The NUL character is not allowed.", param=path)
        return raw
    # Exactly int: bool is a subclass of it.
    if not isinstance(raw, list) or not raw or set(map(type, raw)) != {int}:
        raise _wrong(path)
    return raw


def _wrong(path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path} must be a string, a list of strings, a list of token ids, or a list of such lists; none may be empty.",
        param=path,
    )


class CompletionRequest(GenerationFields):
    """Prompts to be continued."""

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ]
            }
        ),
    ] = Field(description="One prompt or several, as text or as token ids.")

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, COMPLETION)
        return raw

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        choices = len(self.prompt) * (self.n or 1)
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"The request asks for {choices} choices; at most {MAX_CHOICES} are allowed.", param="n"
            )
        return self
