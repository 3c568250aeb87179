"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from tercet_frontend.schemas.asked import Asked
from tercet_frontend.schemas.validation import Text  # noqa: TC001  # pydantic evaluates it
from tercet_shared.errors import InvalidRequestError

MAX_CHARACTERS = 2_000_000
"""Of one text: a second or two of work for one thread."""

MAX_TOKENS = 1_000_000
"""Ids of one request to ``/detokenize``; its answer then has a few megabytes."""


class TokenizeRequest(Asked):
    """Either a prompt, or a conversation with what a chat request has of fields that change its tokens."""

    model: Text | None = Field(None, description="Name of a served model; without it, the first of them.")
    prompt: Annotated[Text, Field(max_length=MAX_CHARACTERS)] | None = Field(None, description="A text.")
    messages: list[dict[str, Any]] | None = Field(None, description="A conversation, as in a chat request.")
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer adds to texts: true by default for a prompt, false for messages."
    )
    return_token_strs: bool | None = Field(None, description="Return the tokens as strings, too.")

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(Asked):
    """Tokens to be made into text."""

    model: Text | None = Field(None, description="Name of a served model; without it, the first of them.")
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
