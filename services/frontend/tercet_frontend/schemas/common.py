"""What requests for chat and for plain completions have in common."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from tercet_frontend.schemas.asked import SessionFields
from tercet_frontend.schemas.ranges import (
    MIN_P,
    PENALTY,
    REPETITION_PENALTY,
    SOME_TOKENS,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
)
from tercet_frontend.schemas.structured import Choices, ResponseFormat, StructuredOutputs, grammar_of
from tercet_frontend.schemas.unbuilt import STREAM_OPTIONS, refuse_unbuilt
from tercet_frontend.schemas.validation import Strict, Text
from tercet_shared.errors import InvalidRequestError
from tercet_shared.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    OFF,
)

if TYPE_CHECKING:
    from tercet_shared.structured import Grammar

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1_000
MAX_WORD_LENGTH = 1_000
MAX_SALT_LENGTH = 256
MAX_QUEUE_TIMEOUT = 86_400.0
"""Seconds."""

_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
_TokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
_Allowed = Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
_Word = Annotated[Text, Field(min_length=1, max_length=MAX_WORD_LENGTH)]
# Half of what the core takes: each word is excluded in two spellings.
_Words = Annotated[list[_Word], Field(max_length=MAX_BAD_WORDS // 2, fail_fast=True)]
LogProbs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
"""Alternatives per token for which log-probabilities are shown."""


_ONE_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOPS_SCHEMA: dict[str, Any] = {
    "anyOf": [_ONE_STOP, {"type": "array", "items": _ONE_STOP, "maxItems": MAX_STOPS}, {"type": "null"}]
}
_BIASES_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {"type": "null"},
    ]
}


def _stops(raw: Any) -> tuple[str, ...] | None:
    """Returns the stop strings. By hand: Pydantic's union would complain about the form that was not meant."""
    if raw is None:
        return None
    if isinstance(raw, str):
        return (_stop(raw, "stop"),)
    if not isinstance(raw, list):
        raise InvalidRequestError("stop must be a string or a list of strings.", param="stop")
    if len(raw) > MAX_STOPS:
        raise InvalidRequestError(f"stop: at most {MAX_STOPS} strings are allowed, not {len(raw)}.", param="stop")
    return tuple(_stop(item, f"stop[{index}]") for index, item in enumerate(raw))


def _stop(raw: Any, path: str) -> str:
    if not isinstance(raw, str) or not 1 <= len(raw) <= MAX_STOP_LENGTH or "\0" in raw:
        raise InvalidRequestError(
            f"{path} must be a string of 1 to {MAX_STOP_LENGTH} characters without NUL.", param=path
        )
    return raw


def _biases(raw: Any) -> tuple[tuple[int, float], ...] | None:
    """Returns (id, bias) pairs; JSON writes the ids as strings."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise InvalidRequestError("logit_bias must be an object: a number for each token id.", param="logit_bias")
    if len(raw) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias: at most {MAX_LOGIT_BIAS} tokens are allowed.", param="logit_bias")
    for token, bias in raw.items():
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise InvalidRequestError("logit_bias: its keys must be token ids.", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise InvalidRequestError("logit_bias: its values must be numbers.", param="logit_bias")
    return tuple((int(token), float(bias)) for token, bias in raw.items())


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before the end.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk has the usage so far."
    )

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            refuse_unbuilt(raw, STREAM_OPTIONS, "stream_options.")
        return raw


class GenerationFields(SessionFields):
    """Fields of every request that generates text. Ranges that `SamplingParams.check` knows are not repeated here."""

    model: Text = Field(description="Name of a served model.")
    max_tokens: int | None = Field(None, description="Output tokens at most.", json_schema_extra=SOME_TOKENS)
    min_tokens: int | None = Field(
        None, description="Output tokens before which the model may not end.", json_schema_extra=TOKENS
    )
    temperature: float | None = Field(None, description="0 takes the most likely token.", json_schema_extra=TEMPERATURE)
    top_p: float | None = Field(
        None,
        description="Draw from the most likely tokens of this total probability.",
        json_schema_extra=TOP_P,
    )
    top_k: int | None = Field(
        None,
        description="Draw from this many most likely tokens; 0 or -1: from all.",
        json_schema_extra=TOP_K,
    )
    min_p: float | None = Field(
        None,
        description="Drop tokens below this share of the best one's probability.",
        json_schema_extra=MIN_P,
    )
    seed: _Seed | None = Field(None, description="Makes a sampled answer repeatable.")
    presence_penalty: float | None = Field(
        None,
        description="Against tokens that are in the output.",
        json_schema_extra=PENALTY,
    )
    frequency_penalty: float | None = Field(
        None, description="The same, for each time that they are.", json_schema_extra=PENALTY
    )
    repetition_penalty: float | None = Field(
        None,
        description="Divides logits of tokens in prompt and output.",
        json_schema_extra=REPETITION_PENALTY,
    )
    logit_bias: Annotated[
        tuple[tuple[int, float], ...] | None,
        BeforeValidator(_biases),
        WithJsonSchema(_BIASES_SCHEMA),
    ] = Field(None, description="What is added to the logits of tokens, by id; -100 to 100.")
    allowed_token_ids: _Allowed | None = Field(None, description="No other token is drawn.")
    bad_words: _Words | None = Field(None, description="Words that are not written, nor with a space before them.")
    stop: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_stops),
        WithJsonSchema(_STOPS_SCHEMA),
    ] = Field(None, description="Strings at which the answer ends; not part of it.")
    stop_token_ids: _TokenIds | None = Field(None, description="Tokens at which the answer ends.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave the stop string in the text.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence token.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; the default.")
    spaces_between_special_tokens: bool | None = Field(None, description="Accepted, without effect.")
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(None, description="Choices per prompt.")
    prompt_logprobs: LogProbs | None = Field(None, description="Alternatives per token of the prompt.")
    return_token_ids: bool | None = Field(None, description="Answer with the ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Write tokens as token_id:5.")
    add_special_tokens: bool | None = Field(None, description="Add what the tokenizer adds around a text.")
    truncate_prompt_tokens: int | None = Field(None, description="Keep the last so many tokens; -1: what fits.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: Text | None = Field(None, description="The older name of structured_outputs.grammar.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description="Smaller is served first.")
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = Field(
        None, description="Requests share cached prefixes only with those of the same salt."
    )
    queue_timeout: Annotated[float, Field(gt=0, le=MAX_QUEUE_TIMEOUT)] | None = Field(
        None, description="Seconds that the request may wait until it is served."
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return self.stop or ()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def generated_per_prompt(self) -> int:
        """Choices to be generated for each prompt; the best ``n`` of them are the answer."""
        return self.n or 1

    @property
    def score_only(self) -> bool:
        """Whether nothing is to be generated."""
        return False

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer must look like; raises `InvalidRequestError` as `grammar_of` does."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return grammar_of(self.response_format, self.structured_outputs, guided)

    def requested_max_tokens(self) -> tuple[int | None, str]:
        """Returns the limit that was asked for, if any, and the name of its field."""
        return self.max_tokens, "max_tokens"

    def generated_logprobs(self) -> int:
        """Returns the alternatives per output token that the core is asked for; `OFF` for nothing."""
        return OFF

    def scored_prompt_logprobs(self) -> int:
        """Returns the alternatives per prompt token that the core is asked for; `OFF` for nothing."""
        return OFF if self.prompt_logprobs is None else self.prompt_logprobs

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream=true.", param="stream_options")
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> GenerationFields:
        _ = self.grammar  # here, so that it is checked with the rest
        return self
