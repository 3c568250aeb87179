"""A request as the core knows it, apart from the counters that live in `RequestTable`'s columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NewType

from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import OFF

if TYPE_CHECKING:
    from tercet_core.scheduling.guides import Guide
    from tercet_core.tracing import RequestTrace
    from tercet_shared.errors import TercetError
    from tercet_shared.hashing import BlockKey
    from tercet_shared.sampling_params import SamplingParams
    from tercet_shared.structured import Grammar
    from tercet_shared.wire.step import I32, Slot

FrontEnd = NewType("FrontEnd", int)
"""The core's number for a front end's stream."""


class Ending(Enum):
    """Why a request ended; the values are those of ``tercet.v1.FinishReason``."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What was submitted, and where the request stands.

    Attributes:
        front_end: the stream that it came on.
        handle: the front end's number for it, unique on its stream.
        attempt: which resubmission this is.
        request_id: for logs.
        prompt_len: tokens of the original prompt.
        tokens: prompt and resumed output, int32; the table holds them once the request has a slot.
        params: sampling parameters and limits.
        root: key before the first block (model, adapter, salt).
        priority: smaller is served first.
        tenant: for fairness.
        pooling: not NONE: it yields one vector and no token.
        grammar: what its output must look like; None: free text.
        guide: the grammar, compiled; there before a request with a grammar is queued.
        arrival: order of submission; kept through preemptions.
        slot: its row in every table, from admission to its end.
        keys: keys of its leading whole blocks, as far as they were needed.
        cached_tokens: prompt tokens found in the prefix cache at the first admission.
        admitted: whether it ever ran.
        lost_tokens: tokens computed before the latest preemption, which resuming computes again or finds in the cache.
        traceparent: W3C trace context of a traced request, or empty.
        arrived: when it was taken, by ``time.perf_counter``; 0 once it has had its first step.
        trace: its spans, while it is traced.
    """

    front_end: FrontEnd
    handle: int
    attempt: int
    request_id: str
    prompt_len: int
    tokens: I32
    params: SamplingParams
    root: BlockKey
    priority: int = 0
    tenant: str = ""
    pooling: Pooling = Pooling.NONE
    grammar: Grammar | None = None
    guide: Guide | None = None
    arrival: int = -1
    slot: Slot | None = None
    keys: list[BlockKey] = field(default_factory=list)
    cached_tokens: int = 0
    admitted: bool = False
    lost_tokens: int = 0
    traceparent: str = ""
    arrived: float = 0.0
    trace: RequestTrace | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end it."""
        own = self.params.eos_token_ids + self.params.stop_token_ids
        return own if self.guide is None else tuple(dict.fromkeys(own + self.guide.end_ids))

    @property
    def takes_forced(self) -> bool:
        """Whether tokens that its grammar forces may be taken without being drawn.

        Not where log-probabilities are asked for, which only a step yields, nor where its parameters exclude tokens:
        what is drawn where they and the grammar exclude each other is for the worker to say.
        """
        params = self.params
        return params.logprobs == OFF and not params.allowed_token_ids and not params.bad_words

    @property
    def reads_cache(self) -> bool:
        """Whether it may begin with cached blocks: not where something is asked of every token of its prompt."""
        return self.params.prompt_logprobs == OFF and self.pooling is not Pooling.MEAN


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error outside an ordinary step's rows."""

    request: Request
    error: TercetError
