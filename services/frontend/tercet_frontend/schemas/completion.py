"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from tercet_frontend.schemas.common import MAX_N, GenerationFields, LogProbs
from tercet_frontend.schemas.ranges import TOKENS
from tercet_frontend.schemas.unbuilt import COMPLETION, refuse_unbuilt
from tercet_shared.errors import InvalidRequestError
from tercet_shared.sampling_params import OFF

MAX_PROMPTS = 1_024
MAX_CHOICES = 1_024
"""Choices of one request, over all its prompts."""

Prompt = str | list[int]
"""One prompt, as text or as token ids (integers; their range is checked where the vocabulary is known)."""


def prompts_in(raw: Any, name: str = "prompt") -> tuple[Prompt, ...]:
    """Returns the prompts in any of the four forms. By hand: Pydantic's unions report an error per element and form.

    Args:
        raw: the JSON value.
        name: of its field, for errors.

    Raises:
        InvalidRequestError: it has none of these forms, or too many prompts.
    """
    if isinstance(raw, str):
        return (_prompt(raw, name),)
    if not isinstance(raw, list) or not raw:
        raise _wrong(name)
    if type(raw[0]) is int:
        return (_prompt(raw, name),)
    if len(raw) > MAX_PROMPTS:
        raise InvalidRequestError(f"{name}: at most {MAX_PROMPTS} prompts are allowed.", param=name)
    prompts = tuple(_prompt(item, f"{name}[{index}]") for index, item in enumerate(raw))
    if len({type(prompt) for prompt in prompts}) > 1:
        raise _wrong(name)
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
        BeforeValidator(prompts_in),
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

    max_tokens: int | None = Field(
        None, description="Output tokens at most; 0 with echo or prompt_logprobs.", json_schema_extra=TOKENS
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        None, description="Generate so many choices per prompt, and answer with the best n."
    )
    echo: bool | None = Field(None, description="Repeat the prompt before the text.")
    logprobs: LogProbs | None = Field(None, description="Alternatives per token; with echo also of the prompt.")

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, COMPLETION)
        return raw

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        kept = self.n or 1
        if self.best_of is not None:
            if self.best_of < kept:
                raise InvalidRequestError(f"best_of must be at least n, which is {kept}.", param="best_of")
            if self.best_of > kept and self.stream:
                raise InvalidRequestError(
                    "best_of above n cannot be streamed: the best are known at the end.", param="best_of"
                )
        choices = len(self.prompt) * self.generated_per_prompt
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"The request asks for {choices} choices; at most {MAX_CHOICES} are allowed.",
                param="best_of" if self.best_of else "n",
            )
        return self

    @property
    def generated_per_prompt(self) -> int:
        """See `GenerationFields`."""
        return self.best_of or self.n or 1

    @property
    def score_only(self) -> bool:
        """See `GenerationFields`: the prompt is all that is asked about."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)

    def generated_logprobs(self) -> int:
        """See `GenerationFields`."""
        if self.logprobs is not None:
            return self.logprobs
        return 0 if self.generated_per_prompt > (self.n or 1) else OFF  # to tell which are the best

    def scored_prompt_logprobs(self) -> int:
        """See `GenerationFields`."""
        echoed = self.logprobs if self.echo and self.logprobs is not None else OFF
        return max(echoed, super().scored_prompt_logprobs())
