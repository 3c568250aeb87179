"""What the API answers, for the OpenAPI document alone: the answers themselves are put together by their shapes.

A field with the default `ABSENT` is left out where it says nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ABSENT: Any = Field(default=None)
_SAME_REASONING: Any = Field(default=None, description="The same as reasoning_content.")


class Described(BaseModel):
    """Base of all answers: they have no other fields."""

    model_config = ConfigDict(extra="forbid")


# ------------------------------------------------------------------------------------------------------ errors, state


class ErrorDetail(Described):
    """What is wrong."""

    message: str
    type: str
    param: str | None = Field(description="The field of the request that is wrong.")
    code: str | None


class ErrorAnswer(Described):
    """A request that failed; also the last event of a stream that did."""

    error: ErrorDetail


class MessagesErrorDetail(Described):
    """What is wrong."""

    type: str
    message: str


class MessagesErrorAnswer(Described):
    """A request that failed, below /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorDetail


class HealthAnswer(Described):
    """Whether the server serves."""

    status: Literal["ok", "not ready"]
    reason: str = ABSENT


class VersionAnswer(Described):
    """Which Tercet this is."""

    version: str


class ModelAnswer(Described):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The model itself; of a name whose requests are divided among models, that name.")
    parent: str | None = Field(description="What an alias stands for.")
    max_model_len: int = Field(description="Tokens of prompt and output together.")


class ModelsAnswer(Described):
    """The models that are served now."""

    object: Literal["list"]
    data: list[ModelAnswer]


class CancelAnswer(Described):
    """A request that was ended."""

    id: str
    object: Literal["request"]
    cancelled: Literal[True]


# ------------------------------------------------------------------------------------------------- chat, completions


class CachedTokens(Described):
    """More about the tokens of a prompt."""

    cached_tokens: int = Field(description="That came from the prefix cache.")


class ReasoningTokens(Described):
    """More about the tokens of an output."""

    reasoning_tokens: int


class UsageAnswer(Described):
    """What a request took. The details come at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = ABSENT
    completion_tokens_details: ReasoningTokens = ABSENT


class Alternative(Described):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogProb(Alternative):
    """A token that stands there; its bytes are what of it is in the answer."""

    top_logprobs: list[Alternative]


class ChatLogProbs(Described):
    """Of the tokens of a choice or chunk."""

    content: list[TokenLogProb]
    refusal: None


class PromptToken(Described):
    """A token where one of the prompt stands."""

    logprob: float
    rank: int = Field(description="1 is the most likely.")
    decoded_token: str


PromptLogProbs = list[dict[str, PromptToken] | None]
"""A table by token id for each token of the prompt but the first."""


class WrittenFunction(Described):
    """A function that is called."""

    name: str
    arguments: str = Field(description="JSON.")


class WrittenCall(Described):
    """A call."""

    id: str
    type: Literal["function"]
    function: WrittenFunction


class ChatMessage(Described):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[WrittenCall] = ABSENT
    reasoning_content: str = ABSENT
    reasoning: str = _SAME_REASONING


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Described):
    """One of n."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="The stop string or stop token that ended it.")
    logprobs: ChatLogProbs | None
    token_ids: list[int] = ABSENT


class ChatCompletion(Described):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogProbs = ABSENT
    prompt_token_ids: list[int] = ABSENT


class FunctionDelta(Described):
    """More of a function that is called."""

    name: str = ABSENT
    arguments: str


class CallDelta(Described):
    """More of a call."""

    index: int
    id: str = ABSENT
    type: Literal["function"] = ABSENT
    function: FunctionDelta


class ChatDelta(Described):
    """More of what the assistant says."""

    role: Literal["assistant"] = ABSENT
    content: str = ABSENT
    tool_calls: list[CallDelta] = ABSENT
    reasoning_content: str = ABSENT
    reasoning: str = ABSENT


class ChunkChoice(Described):
    """More of a choice."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    stop_reason: str | int | None = ABSENT
    logprobs: ChatLogProbs | None
    token_ids: list[int] = ABSENT


class ChatCompletionChunk(Described):
    """An event of a stream, which ends with [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | None = ABSENT
    prompt_logprobs: PromptLogProbs = ABSENT
    prompt_token_ids: list[int] = ABSENT


class LegacyLogProbColumns(Described):
    """Columns, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    """One of n; in a stream, more of it."""

    index: int
    text: str
    logprobs: LegacyLogProbColumns | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = ABSENT
    token_ids: list[int] = ABSENT
    prompt_logprobs: PromptLogProbs = ABSENT
    prompt_token_ids: list[int] = ABSENT


class Completion(Described):
    """A whole answer, or an event of a stream, which ends with [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = ABSENT


# ------------------------------------------------------------------------------------------------ embeddings, tokens


class Embedding(Described):
    """One text's vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or their little-endian float32 bytes as base64.")


class EmbeddingUsage(Described):
    """What a request took."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Described):
    """A vector for each text."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeAnswer(Described):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Described):
    """The text."""

    prompt: str


# --------------------------------------------------------------------------------------------------------- responses


class OutputText(Described):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogProb]


class OutputMessage(Described):
    """What the assistant says."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Described):
    """A function that is called."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ReasoningContent(Described):
    """Text of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Described):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningContent]


class ResponseUsage(Described):
    """What a response took."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Described):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Described):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswerBody(Described):
    """A response. Fields of the request come back in it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool = Field(description="Whether it was stored.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(BaseModel):
    """An event of a stream; what else it has depends on its type."""

    type: str
    sequence_number: int


class DeletedResponse(Described):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Described):
    """Items that a request brought."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---------------------------------------------------------------------------------------------------------- messages


class MessageText(Described):
    """Text."""

    type: Literal["text"]
    text: str


class MessageToolUse(Described):
    """A function that is called."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageThinking(Described):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class MessageUsage(Described):
    """What a message took."""

    input_tokens: int = Field(description="Without those that came from the prefix cache.")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Described):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageToolUse | MessageThinking]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a stream; what else it has depends on its type."""

    type: str


class CountTokensAnswer(Described):
    """How long a conversation is."""

    input_tokens: int


ANSWERS: dict[tuple[str, str], tuple[type[BaseModel], type[BaseModel] | None]] = {
    ("post", "/v1/chat/completions"): (ChatCompletion, ChatCompletionChunk),
    ("post", "/v1/completions"): (Completion, Completion),
    ("post", "/v1/responses"): (ResponseAnswerBody, ResponseEvent),
    ("get", "/v1/responses/{response_id}"): (ResponseAnswerBody, None),
    ("delete", "/v1/responses/{response_id}"): (DeletedResponse, None),
    ("post", "/v1/responses/{response_id}/cancel"): (ResponseAnswerBody, None),
    ("get", "/v1/responses/{response_id}/input_items"): (InputItems, None),
    ("post", "/v1/messages"): (MessageAnswer, MessageEvent),
    ("post", "/v1/messages/count_tokens"): (CountTokensAnswer, None),
    ("post", "/v1/embeddings"): (EmbeddingsAnswer, None),
    ("post", "/tokenize"): (TokenizeAnswer, None),
    ("post", "/detokenize"): (DetokenizeAnswer, None),
    ("get", "/v1/models"): (ModelsAnswer, None),
    ("get", "/v1/models/{model}"): (ModelAnswer, None),
    ("delete", "/v1/requests/{request_id}"): (CancelAnswer, None),
    ("get", "/version"): (VersionAnswer, None),
    ("get", "/livez"): (HealthAnswer, None),
    ("get", "/readyz"): (HealthAnswer, None),
    ("get", "/health"): (HealthAnswer, None),
}
"""By method and path: the answer as JSON, and the events of a stream where the request may ask for one."""
