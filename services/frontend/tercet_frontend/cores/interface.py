"""What the API asks of the cores, and what it gets: the seam between HTTP and the engine streams.

The API knows choices and their tokens; which core runs a choice, over which stream, in which attempt, is behind this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tercet_shared.pooling import Pooling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tercet_shared.sampling_params import SamplingParams
    from tercet_shared.structured import Grammar


class FinishReason(Enum):
    """Why a choice ended without an error; the values are OpenAI's words, ABORT is ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice.

    Attributes:
        reason: why.
        stop_id: the end-of-sequence or stop token that was drawn (it is among the tokens), else None.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    reason: FinishReason
    stop_id: int | None
    cached_tokens: int


class TokenLogProbs(NamedTuple):
    """Log-probabilities where one token stands: natural logarithms, of the raw logits.

    Attributes:
        logprob: of the token that stands there.
        rank: of it; 1 is the most likely token.
        top_ids: the most likely tokens, the likeliest first, as many as the request asked for.
        top_logprobs: of each of them.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Start:
    """What is known when the first token comes.

    Attributes:
        cached_tokens: prompt tokens that came from the prefix cache.
        prompt_logprobs: of all prompt tokens but the first, in order; None when they were not asked for.
    """

    cached_tokens: int
    prompt_logprobs: list[TokenLogProbs] | None


class Tokens(NamedTuple):
    """What came since the last call: some tokens, the end, or both.

    Attributes:
        ids: the tokens.
        finished: the end.
        logprobs: one for each of ``ids``; None when they were not asked for.
        start: with the first tokens; None later, and where the core did not say.
        pooled: float32[hidden size], with the end of a request that asked for a vector.
    """

    ids: list[int]
    finished: Finished | None
    logprobs: list[TokenLogProbs] | None = None
    start: Start | None = None
    pooled: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One choice to be generated.

    Attributes:
        request_id: the API request's id, for logs and routes (the choices of one request share it).
        model: the name under which the client asked for it; it was checked against `Cores.models`.
        prompt_ids: int32[n], at least one token.
        params: checked by the front end and once more by the core.
        priority: smaller is served first.
        tenant: for fairness and cache isolation; empty without API keys.
        cache_salt: keeps cached prefixes of different owners apart.
        traceparent: W3C trace context, or empty.
        grammar: what the output must look like, or None.
        pooling: not NONE: the request yields one vector and no token.
        queue_timeout: seconds that it may wait for its first step; 0: no limit.
        session: what belongs together, for routing by session; or empty.
    """

    request_id: str
    model: str
    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    traceparent: str = ""
    grammar: Grammar | None = None
    pooling: Pooling = Pooling.NONE
    queue_timeout: float = 0.0
    session: str = ""


class Generation(Protocol):
    """One choice's tokens, from its submission to its one terminal event.

    The terminal event is either a `Tokens` whose ``finished`` is set, or a `TercetError` raised by `next` (refused,
    no core left, failed). After it, `finish` and `abort` do nothing.
    """

    async def next(self) -> Tokens:
        """Waits for tokens and returns all that have come since the last call.

        Cancelling the call loses nothing. Calling it after the terminal event is an error of the caller.
        """

    def finish(self, output_tokens: int) -> None:
        """Ends the choice because a stop string was found after ``output_tokens`` output tokens; returns at once.

        No further event is to be awaited.
        """

    def abort(self, reason: str) -> None:
        """Gives the choice up (the client is gone, a sibling failed); returns at once. No further event comes."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one core serves now.

    Attributes:
        name: as clients ask for it.
        max_model_len: tokens of prompt and output together.
        vocab_size: ids below it are valid.
    """

    name: str
    max_model_len: int
    vocab_size: int


class Cores(Protocol):
    """All cores that this front end knows."""

    def not_ready_reason(self) -> str | None:
        """Returns why no request can be served now, in one sentence, or None when one can."""

    def models(self) -> list[ServedModel]:
        """Returns the models that can be asked for now."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Chooses a core and hands the request over; returns at once.

        Raises:
            UnavailableError: no core can take it (503).
            InvalidRequestError: it is larger than a core accepts (400).
        """
