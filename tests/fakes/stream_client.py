"""A front end's side of the engine stream, in the raw: it submits token ids and notes all that it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import grpc
import numpy as np

from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc

TIMEOUT = 60.0
"""Seconds after which a wait fails: far beyond what anything here takes, also on a loaded machine."""


LogProb = tuple[float, int, list[tuple[int, float]]]
"""Of one token: its log-probability, its rank, and alternatives with theirs."""


def logprobs_in(message: pb.LogProbs) -> list[LogProb]:
    """Returns the log-probabilities of a message, token by token."""
    own = np.frombuffer(message.token_logprobs, "<f4").tolist()
    ranks = np.frombuffer(message.token_ranks, "<i4").tolist()
    offsets = np.frombuffer(message.top_offsets, "<i4").tolist()
    ids, tops = np.frombuffer(message.top_ids, "<i4").tolist(), np.frombuffer(message.top_logprobs, "<f4").tolist()
    assert len(own) == len(ranks) == len(offsets) - 1
    assert len(ids) == len(tops) == offsets[-1]
    alternatives = [list(zip(ids[a:b], tops[a:b], strict=True)) for a, b in pairwise(offsets)]
    return list(zip(own, ranks, alternatives, strict=True))


@dataclass
class Choice:
    """What a front end has heard of one request."""

    tokens: list[int] = field(default_factory=list)
    reason: int | None = None
    stop_id: int = -1
    cached: int = 0
    error: pb.RowError | None = None
    rejected: pb.Rejected | None = None
    terminal_events: int = 0
    started: int = 0  # frames that said that its first token is in them
    start_cached: int = -1
    logprobs: list[LogProb] = field(default_factory=list)
    prompt_logprobs: dict[int, LogProb] = field(default_factory=dict)  # by position
    pooled: list[float] | None = None


class Client:
    """A front end's side of the stream, in the raw."""

    def __init__(
        self, address: str, name: str = "test", *, heartbeat: float | None = 0.5, patience: float = TIMEOUT
    ) -> None:
        """``patience``: seconds that `wait_for` waits."""
        self.choices: dict[int, Choice] = {}
        self.stats: pb.Stats | None = None
        self.draining: str | None = None
        self.frames = 0
        self._address = address
        self._name = name
        self._heartbeat = heartbeat
        self._patience = patience
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._news = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address)
        self.stub = engine_pb2_grpc.EngineStub(self._channel)
        self.call = self.stub.Connect()
        await self.call.write(pb.ClientFrame(hello=pb.Hello(frontend_id=self._name, protocol=1)))
        while True:
            frame = await asyncio.wait_for(self.call.read(), TIMEOUT)
            if frame.HasField("welcome"):
                self.welcome = frame.welcome
                break
        self._tasks = [asyncio.create_task(self._read())]
        if self._heartbeat is not None:
            self._tasks.append(asyncio.create_task(self._beat(self._heartbeat)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.call.cancel()
        await self._channel.close()

    async def submit(
        self,
        handle: int,
        prompt: list[int],
        *,
        resumed: list[int] | None = None,
        attempt: int = 0,
        priority: int = 0,
        queue_deadline_s: float = 0.0,
        grammar: pb.Grammar | None = None,
        pooling: pb.Pooling = pb.POOLING_NONE,
        traceparent: str = "",
        **sampling: Any,
    ) -> None:
        self.choices[handle] = Choice()
        values = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 16} | sampling
        await self._write(
            pb.ClientFrame(
                submits=[
                    pb.Submit(
                        handle=handle,
                        attempt=attempt,
                        request_id=f"request-{handle}",
                        prompt_ids=np.array(prompt, "<i4").tobytes(),
                        resumed_ids=np.array(resumed or [], "<i4").tobytes(),
                        sampling=pb.Sampling(**values),
                        priority=priority,
                        queue_deadline_s=queue_deadline_s,
                        grammar=grammar,
                        pooling=pooling,
                        traceparent=traceparent,
                    )
                ]
            )
        )

    async def send(self, **fields: Any) -> None:
        await self._write(pb.ClientFrame(**fields))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until what was heard makes the condition true."""
        async with asyncio.timeout(self._patience), self._news:
            await self._news.wait_for(condition)

    async def finished(self, *handles: int) -> None:
        await self.wait_for(lambda: all(self.choices[handle].terminal_events for handle in handles))

    async def _beat(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self._write(pb.ClientFrame())

    async def _write(self, frame: pb.ClientFrame) -> None:
        async with self._writing:
            await self.call.write(frame)

    async def _read(self) -> None:
        while isinstance(frame := await self.call.read(), pb.EngineFrame):
            self._take(frame)
            async with self._news:
                self._news.notify_all()

    def _take(self, frame: pb.EngineFrame) -> None:
        self.frames += 1
        if frame.HasField("stats"):
            self.stats = frame.stats
        if frame.HasField("draining"):
            self.draining = frame.draining.reason
        for rejected in frame.rejected:
            self.choices[rejected.handle].rejected = rejected
            self.choices[rejected.handle].terminal_events += 1
        step = frame.step
        handles = np.frombuffer(step.handles, "<u8").tolist()
        offsets = np.frombuffer(step.token_offsets, "<i4").tolist()
        ids = np.frombuffer(step.token_ids, "<i4").tolist()
        for run in frame.prompt_logprobs:
            choice = self.choices[run.handle]
            assert not choice.tokens, "prompt log-probabilities after a token"
            choice.prompt_logprobs |= dict(enumerate(logprobs_in(run.logprobs), run.first))
        starts = np.frombuffer(step.start_rows, "<i4").tolist()
        for row, cached in zip(starts, np.frombuffer(step.start_cached, "<i4").tolist(), strict=True):
            assert not self.choices[handles[row]].tokens, "a start after the first token"
            self.choices[handles[row]].started += 1
            self.choices[handles[row]].start_cached = cached
        for row, handle in enumerate(handles):
            self.choices[handle].tokens += ids[offsets[row] : offsets[row + 1]]
        found = iter(logprobs_in(step.logprobs) if step.HasField("logprobs") else [])
        for row in np.frombuffer(step.logprobs.rows, "<i4").tolist():
            self.choices[handles[row]].logprobs += [next(found) for _ in range(offsets[row + 1] - offsets[row])]
        assert next(found, None) is None, "log-probabilities of no token"
        vectors = np.frombuffer(step.pooled, "<f4").reshape(len(step.pooled_rows) // 4, -1) if step.pooled else []
        for row, vector in zip(np.frombuffer(step.pooled_rows, "<i4").tolist(), vectors, strict=True):
            self.choices[handles[row]].pooled = vector.tolist()
        stop_ids = np.frombuffer(step.finish_stop_ids, "<i4").tolist()
        cached = np.frombuffer(step.finish_cached, "<i4").tolist()
        for i, row in enumerate(np.frombuffer(step.finish_rows, "<i4").tolist()):
            choice = self.choices[handles[row]]
            choice.reason, choice.stop_id, choice.cached = step.finish_reasons[i], stop_ids[i], cached[i]
            choice.terminal_events += 1
        for error in step.errors:
            self.choices[handles[error.row]].error = error
