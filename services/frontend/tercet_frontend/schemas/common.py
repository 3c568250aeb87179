"""What requests for chat and for plain completions have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from tercet_frontend.schemas.unbuilt import STREAM_OPTIONS, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError
from tercet_shared.sampling_params import MAX_STOP_TOKEN_IDS

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1_000

_Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
_TokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before the end.")

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            refuse_unbuilt(raw, STREAM_OPTIONS, "stream_options.")
        return raw


class GenerationFields(Strict):
    """Fields of every request that generates text. Ranges that `SamplingParams.check` knows are not repeated here."""

    model: Text = Field(description="Name of a served model.")
    max_tokens: int | None = Field(None, description="Output tokens at most.")
    min_tokens: int | None = Field(None, description="Output tokens before which the model may not end.")
    temperature: float | None = Field(None, description="0 takes the most likely token.")
    top_p: float | None = Field(None, description="Draw from the most likely tokens of this total probability.")
    top_k: int | None = Field(None, description="Draw from this many most likely tokens; 0 or -1: from all.")
    min_p: float | None = Field(None, description="Drop tokens below this share of the best one's probability.")
    seed: _Seed | None = Field(None, description="Makes a sampled answer repeatable.")
    stop: _Stop | _Stops | None = Field(None, description="Strings at which the answer ends; not part of it.")
    stop_token_ids: _TokenIds | None = Field(None, description="Tokens at which the answer ends.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence token.")
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(None, description="Choices per prompt.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, description="Accepted, without effect.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def requested_max_tokens(self) -> tuple[int | None, str]:
        """Returns the limit that was asked for, if any, and the name of its field."""
        return self.max_tokens, "max_tokens"

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true.", param="stream_options")
        return self
