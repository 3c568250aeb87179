"""The answer to a request that generates text, streamed or not: one ASGI response that runs the choices of a job."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from tercet_frontend.access.exchange import Exchange
from tercet_frontend.admission import ClientGoneError
from tercet_frontend.api.answers import AnswerHead, Detail, FinishedChoice, Usage, joined
from tercet_frontend.api.choices import Choice, Choices, DetailRecorder
from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.cores.interface import GenerationRequest
from tercet_frontend.shortcut import shortcut
from tercet_frontend.sse import EventStream
from tercet_frontend.text import StopStrings, TextStream
from tercet_shared.errors import InternalError, TercetError
from tercet_shared.sampling_params import OFF

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt
    from starlette.types import Receive, Scope, Send

    from tercet_frontend.admission import Admission, Serving
    from tercet_frontend.api.answers import AnswerShape, ChunkEncoder, Ending, ParserFactory
    from tercet_frontend.cores.interface import Tokens
    from tercet_frontend.parsing.events import Event
    from tercet_shared.sampling_params import SamplingParams
    from tercet_shared.structured import Grammar

HEADER_DELAY = 0.5
"""Seconds that a stream waits for the first tokens before it sends headers: a request that its core refuses at once
still gets a proper status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request.

    Attributes:
        model: the name that was asked for.
        shape: how the answer is written.
        prompts: int32[n] each.
        params: of every choice that is generated: those of the first prompt, then those of the second, …
        choices_per_prompt: how often each prompt is answered; where more are generated, the best are taken.
        stop: stop strings.
        include_stop: leave the stop string (or stop token) in the text.
        skip_special_tokens: leave special tokens out of the text.
        parser: makes the parsers of the choices; None makes all text content.
        grammar: what every output must look like, or None.
        detail: whether the shape gets tokens with the events.
        prompt_detail: whether it gets the prompt's as well.
        score_only: nothing but the prompt's detail is asked for; what is generated is dropped.
        stream: whether to stream the answer.
        include_usage: whether a stream ends with the usage.
        tenant: whose request it is; empty without API keys.
        cache_salt: keeps cached prefixes of different owners apart.
        priority: smaller is served first.
        queue_timeout: seconds that a choice may wait for its first step; 0: no limit.
        request_id: the one in ``X-Request-Id``, by which the client may end it; empty for none.
        exchange: is told what the request costs and how it ends.
    """

    model: str
    shape: AnswerShape
    prompts: Sequence[npt.NDArray[np.int32]]
    params: Sequence[SamplingParams]
    choices_per_prompt: int = 1
    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    parser: ParserFactory | None = None
    grammar: Grammar | None = None
    detail: bool = False
    prompt_detail: bool = False
    score_only: bool = False
    stream: bool = False
    include_usage: bool = False
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    queue_timeout: float = 0.0
    request_id: str = ""
    exchange: Exchange = field(default_factory=Exchange)

    @property
    def generated_per_prompt(self) -> int:
        """Choices that are generated for each prompt."""
        return len(self.params) // len(self.prompts)


class Answer(NamedTuple):
    """A whole answer, before it is given a shape."""

    head: AnswerHead
    choices: list[FinishedChoice]
    usage: Usage


def head_of(job: Job) -> AnswerHead:
    """Returns a new head for the answer to ``job``."""
    return AnswerHead(
        identity=job.shape.identity_prefix + token_hex(16),
        created=int(time.time()),
        model=job.model,
        prompt_tokens=sum(len(prompt) for prompt in job.prompts),
    )


async def run_whole(job: Job, serving: Serving, head: AnswerHead) -> Answer:
    """Runs ``job`` to its end, without HTTP. Cancelling gives all choices up.

    Raises:
        TercetError: the request failed.
    """
    choices = _submit(job, serving, head)
    events: list[list[Event]] = [[] for _ in choices.all]
    details = [Detail() if job.detail else None for _ in choices.all]
    async with choices:
        with _accounted(job, head, choices):
            while choices.running:
                batch = await choices.next()
                job.exchange.began()
                if any(tokens.ids for _, tokens in batch):
                    job.exchange.watch.first_token()
                for choice, tokens in batch:
                    events[choice.index] += choice.take(tokens)
                    detail = choice.take_detail()
                    so_far = details[choice.index]
                    if detail is not None and so_far is not None:
                        so_far.extend(detail)
    finished = [
        FinishedChoice(choice.index, joined(events[choice.index]), choice.ending, details[choice.index])
        for choice in choices.all
        if choice.ending is not None
    ]
    return Answer(head, _best(job, finished), _usage(job, head, choices))


class GenerationResponse(Response):
    """Submits the choices of a job when it is called, and writes the answer as it comes.

    Exactly one terminal event on every path: a status with an error body while nothing was sent, otherwise the end of
    the stream. Whatever happens, no choice is left running.
    """

    def __init__(self, job: Job, serving: Serving, admission: Admission) -> None:
        super().__init__()
        self._job = job
        self._serving = serving
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request.

        Raises:
            TercetError: the request failed before anything was sent.
            ClientGoneError: the client went away before anything was sent.
        """
        job = self._job
        head = head_of(job)
        ids = (head.identity, job.request_id)
        if not job.stream:
            work = run_whole(job, self._serving, head)
            answer = await self._admission.run(receive, work, tenant=job.tenant, ids=ids)
            await JsonResponse(job.shape.body(*answer))(scope, receive, send)
            return
        job.exchange.watch.streaming()
        events = EventStream(send, shortcut(scope), heartbeat=job.exchange.heartbeat)
        chunks = job.shape.chunks(head)
        try:
            streaming = self._stream(events, head, chunks)
            last = await self._admission.run(receive, streaming, tenant=job.tenant, ids=ids)
            # Here and not within: whoever reads the end finds the request over, its place free and its cost charged.
            await events.finish(last)
        except (TercetError, ClientGoneError) as error:
            if not events.started:
                raise
            if isinstance(error, TercetError):
                job.exchange.failed(error)
                await events.finish(chunks.error(error))
        except Exception:
            # A fault of ours: the client still gets its terminal event, and the server logs the rest.
            if events.started:
                fault = InternalError("The server had an error while it generated the answer.")
                await events.finish(chunks.error(fault))
            raise
        finally:
            events.close()

    async def _stream(self, events: EventStream, head: AnswerHead, chunks: ChunkEncoder) -> bytes:
        job = self._job
        choices = _submit(job, self._serving, head)
        async with choices:
            with _accounted(job, head, choices):
                return await _relay(job, head, events, chunks, choices)


async def _relay(job: Job, head: AnswerHead, events: EventStream, chunks: ChunkEncoder, choices: Choices) -> bytes:
    """Writes what comes of the choices, to the end of the last one. Returns what ends the stream."""
    batch: list[tuple[Choice, Tokens]] = []
    try:
        async with asyncio.timeout(HEADER_DELAY):
            batch = await choices.next()
    except TimeoutError:
        pass
    first = b"".join([chunks.opening(choice.index) for choice in choices.all]) + _encode(chunks, batch)
    if first or not batch:
        await events.write(first)
    if not batch:
        batch = await choices.next()
        encoded = _encode(chunks, batch)
        if encoded:
            await events.write(encoded)
    job.exchange.began()
    if any(tokens.ids for _, tokens in batch):
        job.exchange.watch.first_token()
    if choices.only is not None:
        await _follow(events, chunks, choices.only)
    while choices.running:
        encoded = _encode(chunks, await choices.next())
        if encoded:
            await events.write(encoded)
    usage = chunks.usage(_usage(job, head, choices)) if job.include_usage else b""
    return usage + chunks.done()


@contextmanager
def _accounted(job: Job, head: AnswerHead, choices: Choices) -> Iterator[None]:
    """Tells the exchange what the choices cost, however they end."""
    try:
        yield
    finally:
        usage = _usage(job, head, choices)
        reasons = [choice.ending.reason for choice in choices.all if choice.ending is not None]
        if usage.completion_tokens or reasons:
            job.exchange.used(usage.prompt_tokens, usage.completion_tokens, reasons)


def _submit(job: Job, serving: Serving, head: AnswerHead) -> Choices:
    """Hands all choices over. Either all are submitted or none is left."""
    stop = StopStrings(job.stop)
    detokenizer = serving.text.detokenizer
    if job.parser is not None:
        detokenizer = detokenizer.showing(job.parser.shown_token_ids)
    submitted: list[Choice] = []
    try:
        for index, params in enumerate(job.params):
            prompt_ids = job.prompts[index // job.generated_per_prompt]
            text = TextStream(
                detokenizer,
                prompt_ids,
                stop=stop,
                skip_special_tokens=job.skip_special_tokens,
                include_stop=job.include_stop,
                min_tokens=params.min_tokens,
                spans=job.detail,
            )
            generation = job.exchange.watch.submit(
                serving.cores.submit,
                GenerationRequest(
                    request_id=head.identity,
                    model=serving.target,
                    prompt_ids=prompt_ids,
                    params=params,
                    priority=job.priority,
                    tenant=job.tenant,
                    cache_salt=job.cache_salt,
                    traceparent=job.exchange.traceparent,
                    grammar=job.grammar,
                    queue_timeout=job.queue_timeout,
                    session=job.exchange.session,
                ),
            )
            submitted.append(
                Choice(
                    index,
                    generation,
                    text,
                    parser=None if job.parser is None else job.parser(),
                    recorder=_recorder(job, prompt_ids, params) if job.detail else None,
                    stop_ids=params.stop_token_ids,
                    include_stop=job.include_stop,
                    score_only=job.score_only,
                )
            )
    except BaseException:
        for choice in submitted:
            choice.abort("a sibling was refused")
        raise
    return Choices(submitted)


def _recorder(job: Job, prompt_ids: npt.NDArray[np.int32], params: SamplingParams) -> DetailRecorder:
    return DetailRecorder(
        prompt_ids if job.prompt_detail else None, prompt_logprobs=job.prompt_detail and params.prompt_logprobs != OFF
    )


def _best(job: Job, choices: list[FinishedChoice]) -> list[FinishedChoice]:
    """Returns the choices of the answer: of each prompt those with the best mean log-probability per token."""
    generated, kept = job.generated_per_prompt, job.choices_per_prompt
    if kept == generated:
        return choices
    best: list[FinishedChoice] = []
    for begin in range(0, len(choices), generated):
        own = choices[begin : begin + generated]
        # Stable: of equals, the first counts.
        for choice in sorted(own, key=_mean_logprob, reverse=True)[:kept]:
            best.append(FinishedChoice(len(best), choice.events, choice.ending, choice.detail))
    return best


def _mean_logprob(choice: FinishedChoice) -> float:
    logprobs = (choice.detail.logprobs if choice.detail is not None else None) or ()
    return sum(token.logprob for token in logprobs) / max(len(logprobs), 1)


def _usage(job: Job, head: AnswerHead, choices: Choices) -> Usage:
    # Siblings share their prompt's blocks; only the first one's hits are older than the request.
    cached_tokens = sum(choice.cached_tokens for choice in choices.all[:: job.generated_per_prompt])
    return Usage(
        head.prompt_tokens,
        sum(choice.output_tokens for choice in choices.all),
        cached_tokens,
        sum(choice.reasoning_tokens for choice in choices.all),
    )


async def _follow(events: EventStream, chunks: ChunkEncoder, choice: Choice) -> None:
    """Writes what comes of an answer's only choice until it ends: most streams are that, so nothing is done twice."""
    while choice.ending is None:
        encoded = _encode_one(chunks, choice, await choice.next())
        if encoded:
            await events.write(encoded)


def _encode(chunks: ChunkEncoder, batch: Sequence[tuple[Choice, Tokens]]) -> bytes:
    # What comes after a stop string is no part of the answer.
    return b"".join([_encode_one(chunks, choice, tokens) for choice, tokens in batch if choice.ending is None])


def _encode_one(chunks: ChunkEncoder, choice: Choice, tokens: Tokens) -> bytes:
    events = choice.take(tokens)
    encoded = chunks.events(choice.index, events, choice.take_detail()) if events else b""
    ending: Ending | None = choice.ending
    return encoded if ending is None else encoded + chunks.end(choice.index, ending, choice.take_detail())
