from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]
    GRAMMAR_KIND_EBNF: _ClassVar[GrammarKind]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_NONE: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID: _ClassVar[ErrorKind]
    ERROR_KIND_CONTEXT_LENGTH: _ClassVar[ErrorKind]
    ERROR_KIND_OVERLOADED: _ClassVar[ErrorKind]
    ERROR_KIND_UNAVAILABLE: _ClassVar[ErrorKind]
    ERROR_KIND_INTERNAL: _ClassVar[ErrorKind]
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
GRAMMAR_KIND_EBNF: GrammarKind
POOLING_NONE: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID: ErrorKind
ERROR_KIND_CONTEXT_LENGTH: ErrorKind
ERROR_KIND_OVERLOADED: ErrorKind
ERROR_KIND_UNAVAILABLE: ErrorKind
ERROR_KIND_INTERNAL: ErrorKind

class ClientFrame(_message.Message):
    __slots__ = ("hello", "aborts", "finishes", "submits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("frontend_id", "protocol", "oldest_protocol", "block_events")
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    protocol: int
    oldest_protocol: int
    block_events: bool
    def __init__(self, frontend_id: _Optional[str] = ..., protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., block_events: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "attempt", "request_id", "prompt_ids", "resumed_ids", "sampling", "queue_deadline_s", "tenant", "priority", "traceparent", "cache_salt", "grammar", "pooling")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    request_id: str
    prompt_ids: bytes
    resumed_ids: bytes
    sampling: Sampling
    queue_deadline_s: float
    tenant: str
    priority: int
    traceparent: str
    cache_salt: str
    grammar: Grammar
    pooling: Pooling
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., resumed_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., queue_deadline_s: _Optional[float] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., cache_salt: _Optional[str] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., pooling: _Optional[_Union[Pooling, str]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "param")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    param: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "eos_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "bias_values", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("handle", "attempt", "output_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    output_tokens: int
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handle", "attempt", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    reason: str
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineFrame(_message.Message):
    __slots__ = ("welcome", "step", "rejected", "stats", "draining", "prompt_logprobs", "block_events")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: Step
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    stats: Stats
    draining: Draining
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogProbs]
    block_events: BlockEvents
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogProbs, _Mapping]]] = ..., block_events: _Optional[_Union[BlockEvents, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "core_id", "incarnation", "model_name", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "block_size", "num_blocks", "max_slots", "max_model_len", "max_submit_bytes", "served_names")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CORE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SUBMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    core_id: str
    incarnation: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_slots: int
    max_model_len: int
    max_submit_bytes: int
    served_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., core_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_slots: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_submit_bytes: _Optional[int] = ..., served_names: _Optional[_Iterable[str]] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("first", "changes", "keys", "snapshot")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    first: int
    changes: bytes
    keys: bytes
    snapshot: bool
    def __init__(self, first: _Optional[int] = ..., changes: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., snapshot: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("handles", "attempts", "token_offsets", "token_ids", "finish_rows", "finish_reasons", "finish_stop_ids", "finish_cached", "errors", "logprobs", "start_rows", "start_cached", "pooled_rows", "pooled")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_ROWS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_CACHED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    START_ROWS_FIELD_NUMBER: _ClassVar[int]
    START_CACHED_FIELD_NUMBER: _ClassVar[int]
    POOLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    attempts: bytes
    token_offsets: bytes
    token_ids: bytes
    finish_rows: bytes
    finish_reasons: bytes
    finish_stop_ids: bytes
    finish_cached: bytes
    errors: _containers.RepeatedCompositeFieldContainer[RowError]
    logprobs: LogProbs
    start_rows: bytes
    start_cached: bytes
    pooled_rows: bytes
    pooled: bytes
    def __init__(self, handles: _Optional[bytes] = ..., attempts: _Optional[bytes] = ..., token_offsets: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., finish_rows: _Optional[bytes] = ..., finish_reasons: _Optional[bytes] = ..., finish_stop_ids: _Optional[bytes] = ..., finish_cached: _Optional[bytes] = ..., errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., logprobs: _Optional[_Union[LogProbs, _Mapping]] = ..., start_rows: _Optional[bytes] = ..., start_cached: _Optional[bytes] = ..., pooled_rows: _Optional[bytes] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "kind", "message", "param")
    ROW_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    row: int
    kind: ErrorKind
    message: str
    param: str
    def __init__(self, row: _Optional[int] = ..., kind: _Optional[_Union[ErrorKind, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class LogProbs(_message.Message):
    __slots__ = ("rows", "token_logprobs", "top_offsets", "top_ids", "top_logprobs", "token_ranks")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RANKS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    token_logprobs: bytes
    top_offsets: bytes
    top_ids: bytes
    top_logprobs: bytes
    token_ranks: bytes
    def __init__(self, rows: _Optional[bytes] = ..., token_logprobs: _Optional[bytes] = ..., top_offsets: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., token_ranks: _Optional[bytes] = ...) -> None: ...

class PromptLogProbs(_message.Message):
    __slots__ = ("handle", "attempt", "first", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    first: int
    logprobs: LogProbs
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., first: _Optional[int] = ..., logprobs: _Optional[_Union[LogProbs, _Mapping]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "attempt", "kind", "message", "param")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    kind: ErrorKind
    message: str
    param: str
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., kind: _Optional[_Union[ErrorKind, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "num_blocks", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "recomputed_tokens", "step_ms", "pending_tokens", "token_ms", "without_worker_s", "worker_left")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_WORKER_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_LEFT_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    step_ms: float
    pending_tokens: int
    token_ms: float
    without_worker_s: float
    worker_left: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., step_ms: _Optional[float] = ..., pending_tokens: _Optional[int] = ..., token_ms: _Optional[float] = ..., without_worker_s: _Optional[float] = ..., worker_left: _Optional[bool] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("welcome", "stats", "ready", "not_ready_reason")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    stats: Stats
    ready: bool
    not_ready_reason: str
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., ready: _Optional[bool] = ..., not_ready_reason: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("unfinished",)
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    unfinished: int
    def __init__(self, unfinished: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheReply(_message.Message):
    __slots__ = ("dropped_blocks",)
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: int
    def __init__(self, dropped_blocks: _Optional[int] = ...) -> None: ...
