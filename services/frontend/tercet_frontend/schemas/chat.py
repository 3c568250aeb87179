"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from tercet_frontend.schemas.common import GenerationFields, LogProbs
from tercet_frontend.schemas.messages import ConversationFields
from tercet_frontend.schemas.unbuilt import CHAT, refuse_unbuilt
from tercet_shared.errors import InvalidRequestError
from tercet_shared.sampling_params import OFF


class ChatRequest(ConversationFields, GenerationFields):
    """A conversation to be continued by the assistant."""

    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    echo: bool | None = Field(None, description="Repeat the last message before the answer, if it is the assistant's.")
    logprobs: bool | None = Field(None, description="Answer with the log-probability of each token.")
    top_logprobs: LogProbs | None = Field(None, description="With logprobs: alternatives per token.")

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, CHAT)
        return raw

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens are the same limit; give one.", param="max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs=true.", param="top_logprobs")
        return self

    @property
    def echoed(self) -> str:
        """What the answer begins with."""
        last = self.messages[-1]
        return (last.text or "") if self.echo and last.role == "assistant" else ""

    @property
    def shown_logprobs(self) -> int | None:
        """Alternatives per output token that are shown; None shows no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def generated_logprobs(self) -> int:
        """See `GenerationFields`."""
        return OFF if self.shown_logprobs is None else self.shown_logprobs

    def requested_max_tokens(self) -> tuple[int | None, str]:
        """Returns the limit that was asked for, if any, and the name of its field."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"
