"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tercet_frontend.schemas.common import GenerationFields
from tercet_frontend.schemas.unbuilt import CHAT, MESSAGE, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError

MAX_MESSAGES = 10_000
"""Messages of one conversation: far above what a context holds, below what takes noticeable time to check."""

MAX_PARTS = 1_000
"""Parts of one message."""

MAX_ALL_PARTS = 10_000
"""Parts of all messages together, for the same reason."""


class TextPart(Strict):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    name: Text | None = None

    @property
    def text(self) -> str:
        """The content as one string; parts are put on lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatRequest(GenerationFields):
    """A conversation to be continued by the assistant."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, CHAT)
        messages = raw.get("messages")
        if isinstance(messages, list):
            parts = 0
            for index, message in enumerate(messages[:MAX_MESSAGES]):
                if isinstance(message, dict):
                    refuse_unbuilt(message, MESSAGE, f"messages[{index}].")
                    content = message.get("content")
                    parts += len(content) if isinstance(content, list) else 0
            if parts > MAX_ALL_PARTS:
                raise InvalidRequestError(
                    f"messages: at most {MAX_ALL_PARTS} parts of content are allowed in all.", param="messages"
                )
        return raw

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens are the same limit; give one.", param="max_tokens"
            )
        return self

    def requested_max_tokens(self) -> tuple[int | None, str]:
        """Returns the limit that was asked for, if any, and the name of its field."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"
