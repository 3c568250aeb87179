"""The answer to a request that generates text, streamed or not: one ASGI response that runs the choices."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from tercet_frontend.admission import ClientGoneError
from tercet_frontend.api.choices import Choice, Choices
from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.cores.interface import GenerationRequest
from tercet_frontend.sse import EventStream
from tercet_frontend.text import StopStrings, TextStream
from tercet_shared.errors import InternalError, TercetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from starlette.types import Receive, Scope, Send

    from tercet_frontend.admission import Admission, Serving
    from tercet_frontend.cores.interface import Tokens
    from tercet_frontend.sse import ChunkEncoder
    from tercet_shared.sampling_params import SamplingParams

HEADER_DELAY = 0.5
"""Seconds that a stream waits for the first tokens before it sends headers: a request that its core refuses at once
still gets a proper status."""


class AnswerShape(Protocol):
    """How one endpoint writes its answers."""

    identity_prefix: str
    """What ids begin with."""

    def chunks(self, *, identity: str, created: int, model: str, include_usage: bool) -> ChunkEncoder:
        """Returns the encoder of a streamed answer."""

    def body(self, *, identity: str, created: int, model: str, choices: list[FinishedChoice]) -> dict[str, Any]:
        """Returns a whole answer without its usage, as JSON values."""


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of an answer that is not streamed."""

    index: int
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request.

    Attributes:
        model: the name that was asked for.
        prompts: int32[n] each.
        choices_per_prompt: how often each prompt is answered.
        params: of every choice, by index: those of the first prompt, then those of the second, …
        stop: stop strings.
        stream: whether to stream the answer.
        include_usage: whether a stream ends with the usage.
        tenant: whose request it is; empty without API keys.
    """

    model: str
    prompts: Sequence[npt.NDArray[np.int32]]
    choices_per_prompt: int
    params: Sequence[SamplingParams]
    stop: Sequence[str]
    stream: bool
    include_usage: bool
    tenant: str


class GenerationResponse(Response):
    """Submits the choices of a job when it is called, and writes the answer as it comes.

    Exactly one terminal event on every path: a status with an error body while nothing was sent, otherwise the end of
    the stream. Whatever happens, no choice is left running.
    """

    def __init__(self, job: Job, shape: AnswerShape, serving: Serving, admission: Admission) -> None:
        super().__init__()
        self._job = job
        self._shape = shape
        self._serving = serving
        self._admission = admission
        self._identity = shape.identity_prefix + token_hex(16)
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request.

        Raises:
            TercetError: the request failed before anything was sent.
            ClientGoneError: the client went away before anything was sent.
        """
        if not self._job.stream:
            body = await self._admission.run(receive, self._whole())
            await JsonResponse(body)(scope, receive, send)
            return
        events = EventStream(send)
        try:
            await self._admission.run(receive, self._stream(events))
        except (TercetError, ClientGoneError) as error:
            if not events.started:
                raise
            if isinstance(error, TercetError):
                await events.fail(error)
        except Exception:
            # A fault of ours: the client still gets its terminal event, and the server logs the rest.
            if events.started:
                await events.fail(InternalError("The server had an error while it generated the answer."))
            raise

    async def _whole(self) -> dict[str, Any]:
        choices = self._submit()
        pieces: list[list[str]] = [[] for _ in choices.all]
        async with choices:
            while choices.running:
                for choice, tokens in await choices.next():
                    pieces[choice.index].append(choice.take(tokens))
        finished = [
            FinishedChoice(choice.index, "".join(text), choice.finish_reason or "")
            for choice, text in zip(choices.all, pieces, strict=True)
        ]
        body = self._shape.body(identity=self._identity, created=self._created, model=self._job.model, choices=finished)
        return {**body, "usage": self._usage(choices)}

    async def _stream(self, events: EventStream) -> None:
        chunks = self._shape.chunks(
            identity=self._identity,
            created=self._created,
            model=self._job.model,
            include_usage=self._job.include_usage,
        )
        async with self._submit() as choices:
            batch: list[tuple[Choice, Tokens]] = []
            try:
                async with asyncio.timeout(HEADER_DELAY):
                    batch = await choices.next()
            except TimeoutError:
                pass
            opening = b"".join([chunks.opening(choice.index) for choice in choices.all])
            first = opening + _encode(chunks, batch)
            if first or not batch:
                await events.write(first)
            while choices.running:
                encoded = _encode(chunks, await choices.next())
                if encoded:
                    await events.write(encoded)
            await events.finish(chunks.usage(self._usage(choices)) if self._job.include_usage else b"")

    def _submit(self) -> Choices:
        """Hands all choices over. Either all are submitted or none is left."""
        job = self._job
        stop = StopStrings(job.stop)
        submitted: list[Choice] = []
        try:
            for index, params in enumerate(job.params):
                prompt_ids = job.prompts[index // job.choices_per_prompt]
                text = TextStream(self._serving.text.detokenizer, prompt_ids, stop=stop, min_tokens=params.min_tokens)
                generation = self._serving.cores.submit(
                    GenerationRequest(
                        request_id=self._identity,
                        model=job.model,
                        prompt_ids=prompt_ids,
                        params=params,
                        tenant=job.tenant,
                        cache_salt=job.tenant,
                    )
                )
                submitted.append(Choice(index, generation, text))
        except BaseException:
            for choice in submitted:
                choice.abort("a sibling was refused")
            raise
        return Choices(submitted)

    def _usage(self, choices: Choices) -> dict[str, Any]:
        job = self._job
        prompt_tokens = sum(len(prompt) for prompt in job.prompts)
        completion_tokens = sum(choice.output_tokens for choice in choices.all)
        # Siblings share their prompt's blocks; only the first one's hits are older than the request.
        cached_tokens = sum(choice.cached_tokens for choice in choices.all[:: job.choices_per_prompt])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _encode(chunks: ChunkEncoder, batch: Sequence[tuple[Choice, Tokens]]) -> bytes:
    events: list[bytes] = []
    for choice, tokens in batch:
        ended = choice.finish_reason is not None  # by a stop string; what came after it has no text
        text = choice.take(tokens)
        if text:
            events.append(chunks.text(choice.index, text))
        reason = choice.finish_reason
        if reason is not None and not ended:
            events.append(chunks.end(choice.index, reason))
    return b"".join(events)
