"""A core without a scheduler or a model, behind a real gRPC server: tests say what it sends, and see what it received.

    async with FakeCore() as core:
        ... connect a front end to core.address ...
        request = await core.next_request()
        request.send(5, 6, 7)                      # one frame
        request.send(8, finish=STOP, stop_id=8)
        await core.wait_for(lambda: request.aborted)

With ``outputs`` it plays an engine by itself: each step gives every request its next token, one frame per front end,
until the output, ``max_tokens``, a stop id, a Finish or an Abort ends it::

    async with FakeCore(outputs=lambda request: tokenizer.encode("Paris.").ids + [2]) as core: ...

The player answers as the proto says: the first token's row says how much of the prompt was cached (`cached`),
log-probabilities are those of `scored` where they were asked for, those of the prompt come before the first token,
a request for a vector gets `pooled`, and a grammar for which `unsound` has a sentence is rejected with it.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc

STOP, LENGTH, ABORT, ERROR = (
    pb.FINISH_REASON_STOP,
    pb.FINISH_REASON_LENGTH,
    pb.FINISH_REASON_ABORT,
    pb.FINISH_REASON_ERROR,
)

TIMEOUT = 60.0
"""Seconds after which a wait fails: far beyond what anything here takes, also on a loaded machine."""

_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


@dataclass(eq=False)
class FakeRequest:
    """One Submit, and what came for it afterwards."""

    submit: pb.Submit
    connection: FakeConnection
    abort_reason: str | None = None
    finished_at: int | None = None  # output tokens of a Finish

    @property
    def handle(self) -> int:
        return self.submit.handle

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.submit.prompt_ids, "<i4").tolist()
        return ids

    @property
    def resumed_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.submit.resumed_ids, "<i4").tolist()
        return ids

    @property
    def aborted(self) -> bool:
        return self.abort_reason is not None

    @property
    def over(self) -> bool:
        """Whether the front end has given it up, or is gone."""
        return self.aborted or self.finished_at is not None or self.connection.closed

    def row(self, *ids: int, **more: Any) -> Row:
        """Returns a row for `FakeCore.step`; ``more`` are fields of `Row`."""
        return Row(self.connection, self.handle, self.submit.attempt, ids, **more)

    def send(self, *ids: int, **more: Any) -> None:
        """Sends a frame with one row of this request."""
        self.connection.send(step_frame([self.row(*ids, **more)]))

    def fail(self, kind: pb.ErrorKind, message: str, param: str = "", ids: Sequence[int] = ()) -> None:
        """Ends the request with an error."""
        self.send(*ids, finish=ERROR, error=pb.RowError(kind=kind, message=message, param=param))

    def send_prompt_scores(self, first: int, count: int) -> None:
        """Sends a frame with the scores of ``count`` prompt tokens from position ``first`` on."""
        self.connection.send(pb.EngineFrame(prompt_logprobs=[self.prompt_scores(first, count)]))

    def prompt_scores(self, first: int, count: int) -> pb.PromptLogProbs:
        """Returns the message with the scores of ``count`` prompt tokens from position ``first`` on."""
        ids, alternatives = self.prompt_ids, self.submit.sampling.prompt_logprobs
        scores = [scored(position, ids[position], alternatives) for position in range(first, first + count)]
        return pb.PromptLogProbs(
            handle=self.handle, attempt=self.submit.attempt, first=first, logprobs=logprobs_message(scores)
        )

    def reject(self, kind: pb.ErrorKind, message: str, param: str = "") -> None:
        """Refuses the request."""
        rejected = pb.Rejected(handle=self.handle, attempt=self.submit.attempt, kind=kind, message=message, param=param)
        self.connection.send(pb.EngineFrame(rejected=[rejected]))


Scores = tuple[float, int, Sequence[tuple[int, float]]]
"""Of one token: log-probability, rank, and the most likely tokens with theirs."""


def scored(position: int, token: int, count: int, vocab: int = 49_152) -> Scores:
    """Returns made-up scores that tests can predict: a function of where the token stands, and which it is.

    The token is the second most likely wherever ``count`` is at least 2 and the position even, else it is behind.
    """
    tops = [((token + 1 + rank) % vocab, -0.25 * (rank + 1) - 0.5 * (position % 3)) for rank in range(count)]
    if count >= 2 and position % 2 == 0:
        tops[1] = (token, tops[1][1])
        return tops[1][1], 2, tops
    return -10.0 - 0.125 * (token % 8), count + 5, tops


def logprobs_message(scores: Sequence[Scores], rows: Sequence[int] = ()) -> pb.LogProbs:
    """Returns the columns of these tokens' scores."""
    offsets = np.zeros(len(scores) + 1, "<i4")
    np.cumsum([len(tops) for _, _, tops in scores], out=offsets[1:])
    tops = [top for _, _, tops in scores for top in tops]
    return pb.LogProbs(
        rows=np.array(rows, "<i4").tobytes(),
        token_logprobs=np.array([logprob for logprob, _, _ in scores], "<f4").tobytes(),
        token_ranks=np.array([rank for _, rank, _ in scores], "<i4").tobytes(),
        top_offsets=offsets.tobytes(),
        top_ids=np.array([token for token, _ in tops], "<i4").tobytes(),
        top_logprobs=np.array([logprob for _, logprob in tops], "<f4").tobytes(),
    )


@dataclass
class Row:
    """One row of a Step."""

    connection: FakeConnection
    handle: int
    attempt: int
    ids: Sequence[int]
    finish: int | None = None
    stop_id: int = -1
    cached: int = 0
    error: pb.RowError | None = None
    starts: int | None = None  # the first token is in it; prompt tokens that came from the cache
    scores: Sequence[Scores] | None = None  # one for each of ``ids``
    pooled: Sequence[float] | None = None


def step_frame(rows: Sequence[Row]) -> pb.EngineFrame:
    """Returns the frame of these rows, which are of one connection."""
    offsets = np.zeros(len(rows) + 1, "<i4")
    np.cumsum([len(row.ids) for row in rows], out=offsets[1:])
    ends = [(index, row) for index, row in enumerate(rows) if row.finish is not None]
    errors = []
    for index, row in ends:
        if row.error is not None:
            row.error.row = index
            errors.append(row.error)
    scores = [(index, row.scores) for index, row in enumerate(rows) if row.scores is not None]
    starts = [(index, row.starts) for index, row in enumerate(rows) if row.starts is not None]
    pooled = [(index, row.pooled) for index, row in enumerate(rows) if row.pooled is not None]
    step = pb.Step(
        handles=np.array([row.handle for row in rows], "<u8").tobytes(),
        attempts=np.array([row.attempt for row in rows], "<u4").tobytes(),
        token_offsets=offsets.tobytes(),
        token_ids=np.array([token for row in rows for token in row.ids], "<i4").tobytes(),
        finish_rows=np.array([index for index, _ in ends], "<i4").tobytes(),
        finish_reasons=bytes(row.finish or 0 for _, row in ends),
        finish_stop_ids=np.array([row.stop_id for _, row in ends], "<i4").tobytes(),
        finish_cached=np.array([row.cached for _, row in ends], "<i4").tobytes(),
        errors=errors,
        logprobs=logprobs_message([score for _, own in scores for score in own], [index for index, _ in scores])
        if scores
        else None,
        start_rows=np.array([index for index, _ in starts], "<i4").tobytes(),
        start_cached=np.array([cached for _, cached in starts], "<i4").tobytes(),
        pooled_rows=np.array([index for index, _ in pooled], "<i4").tobytes(),
        pooled=np.array([value for _, vector in pooled for value in vector], "<f4").tobytes(),
    )
    return pb.EngineFrame(step=step)


@dataclass(eq=False)
class FakeConnection:
    """One front end's stream."""

    frontend_id: str = ""
    closed: bool = False
    frames: list[pb.ClientFrame] = field(default_factory=list)  # all but heartbeats, in order
    heartbeats: int = 0
    requests: dict[int, FakeRequest] = field(default_factory=dict)
    _outgoing: asyncio.Queue[pb.EngineFrame | tuple[grpc.StatusCode, str]] = field(default_factory=asyncio.Queue)

    def send(self, frame: pb.EngineFrame) -> None:
        """Queues a frame for the front end."""
        self._outgoing.put_nowait(frame)

    def end(self, code: grpc.StatusCode, details: str = "") -> None:
        """Ends the stream with a status, after what was queued."""
        self._outgoing.put_nowait((code, details))


class FakeCore(engine_pb2_grpc.EngineServicer):
    """See the module.

    Args:
        address: ``host:port`` (port 0: a free one) or ``unix:/path``; kept from one `start` to the next. A test whose
            front end goes on after `kill` takes a port of `tests.fakes.ports`, which nobody else gets meanwhile.
        outputs: the whole output of each request; then the core plays an engine.
        cached: prompt tokens that the player found in its cache.
        pooled: the vector that the player answers with.
        unsound: what is wrong with a grammar; the player takes those for which it is None.
        step_seconds: pause between the steps of that engine.
        heartbeat: seconds between empty frames.
        only_version: the one version of the protocol that it takes in a Hello, as the first release did; 0: any.
        credentials: for TLS.
        welcome: fields of Welcome that differ from the defaults.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        outputs: Callable[[FakeRequest], Sequence[int]] | None = None,
        cached: int = 0,
        pooled: Sequence[float] = (1.0, 0.0),
        unsound: Callable[[pb.Grammar], str | None] = lambda _grammar: None,
        step_seconds: float = 0.0,
        heartbeat: float = 0.5,
        only_version: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        **welcome: Any,
    ) -> None:
        fields: dict[str, Any] = {
            "protocol": only_version or 2, "core_id": "fake", "incarnation": "1", "model_name": "model",
            "model_fingerprint": "weights", "tokenizer_fingerprint": "tokenizer", "vocab_size": 49_152,
            "block_size": 16, "num_blocks": 1000, "max_slots": 256, "max_model_len": 2048,
            "max_submit_bytes": 1024 * 1024,
        }  # fmt: skip
        self.address = address
        self.welcome = pb.Welcome(**(fields | welcome))
        self.refusal: tuple[grpc.StatusCode, str] | None = None  # how new streams are ended at once
        self.greets = True  # whether a Hello is answered with the Welcome
        self.connections: list[FakeConnection] = []
        self.requests: list[FakeRequest] = []
        self._heartbeat = heartbeat
        self._only_version = only_version
        self._credentials = credentials
        self._outputs = outputs
        self._cached = cached
        self._pooled = pooled
        self._unsound = unsound
        self._step_seconds = step_seconds
        self._arrived: asyncio.Queue[FakeRequest] = asyncio.Queue()
        self._playing: dict[FakeRequest, tuple[Sequence[int], int]] = {}
        self._work = asyncio.Event()
        self._speaking = asyncio.Event()
        self._speaking.set()
        self._change = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._engine: asyncio.Task[None] | None = None
        self._release_port: Callable[[], object] = lambda: None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        self._release_port()

    async def start(self) -> None:
        """Listens."""
        if self.address.endswith(":0"):
            self._hold_port()
        self._server = grpc.aio.server(options=_OPTIONS)
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        if self._credentials is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, self._credentials)
        await self._server.start()
        if self._outputs is not None:
            self._engine = asyncio.create_task(self._play(self._outputs))

    def _hold_port(self) -> None:
        """Takes a port: while it is bound the kernel gives it to nobody else, also when this core is dead."""
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # gRPC may listen on it, as it sets that, too
        host = self.address.rpartition(":")[0]
        holder.bind((host, 0))
        self._release_port = weakref.finalize(self, holder.close)
        self.address = f"{host}:{holder.getsockname()[1]}"

    async def kill(self) -> None:
        """Closes everything at once, as a process that dies does."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        self._playing.clear()

    # ------------------------------------------------------------------------------------------------ waiting

    async def next_request(self) -> FakeRequest:
        """Returns the next Submit that was not returned yet."""
        async with asyncio.timeout(TIMEOUT):
            return await self._arrived.get()

    async def next_requests(self, count: int) -> list[FakeRequest]:
        """Returns the next ``count`` of them."""
        return [await self.next_request() for _ in range(count)]

    async def connected(self, count: int = 1) -> FakeConnection:
        """Returns the ``count``-th stream ever, when it has said Hello."""
        await self.wait_for(lambda: len(self.connections) >= count)
        return self.connections[count - 1]

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Returns when ``condition`` holds; it is looked at after each frame that comes, and when a stream ends."""
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                await self._change.wait()

    # ------------------------------------------------------------------------------------------------ doing

    def step(self, rows: Iterable[Row]) -> None:
        """Sends rows of any requests, one frame per front end."""
        by_connection: dict[FakeConnection, list[Row]] = {}
        for row in rows:
            by_connection.setdefault(row.connection, []).append(row)
        for connection, own in by_connection.items():
            connection.send(step_frame(own))

    def stats(self, **fields: Any) -> None:
        """Sends Stats to all front ends."""
        self.broadcast(pb.EngineFrame(stats=pb.Stats(**fields)))

    def drain(self, reason: str = "") -> None:
        """Tells all front ends that it drains."""
        self.broadcast(pb.EngineFrame(draining=pb.Draining(reason=reason)))

    def broadcast(self, frame: pb.EngineFrame) -> None:
        """Sends a frame to all front ends."""
        for connection in self.connections:
            if not connection.closed:
                connection.send(frame)

    def go_silent(self) -> None:
        """Sends nothing any more, heartbeats neither, but keeps its streams open and reads."""
        self._speaking.clear()

    def speak(self) -> None:
        """Ends `go_silent`; what was queued meanwhile is sent."""
        self._speaking.set()

    # ------------------------------------------------------------------------------------------------ the server

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # noqa: N802  # gRPC's name
        if self.refusal is not None:
            await context.abort(*self.refusal)
        connection = FakeConnection()
        reader = asyncio.create_task(self._read(connection, request_iterator))
        writer = asyncio.create_task(self._write(connection, context))
        try:
            await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.closed = True
            self._notify()
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, connection: FakeConnection, frames: Any) -> None:
        async for frame in frames:
            self._receive(connection, frame)
            self._notify()

    def _receive(self, connection: FakeConnection, frame: pb.ClientFrame) -> None:
        if not frame.ByteSize():
            connection.heartbeats += 1
            return
        connection.frames.append(frame)
        if frame.HasField("hello"):
            connection.frontend_id = frame.hello.frontend_id
            self.connections.append(connection)
            if self._only_version not in {0, frame.hello.protocol}:
                connection.end(grpc.StatusCode.FAILED_PRECONDITION, f"this core speaks version {self._only_version}")
            elif self.greets:
                connection.send(pb.EngineFrame(welcome=self.welcome))
        for abort in frame.aborts:
            connection.requests[abort.handle].abort_reason = abort.reason
        for finish in frame.finishes:
            connection.requests[finish.handle].finished_at = finish.output_tokens
        for submit in frame.submits:
            request = FakeRequest(submit, connection)
            connection.requests[submit.handle] = request
            self.requests.append(request)
            self._arrived.put_nowait(request)
            if self._outputs is not None:
                self._admit(request, self._outputs)

    def _admit(self, request: FakeRequest, outputs: Callable[[FakeRequest], Sequence[int]]) -> None:
        reason = self._unsound(request.submit.grammar) if request.submit.HasField("grammar") else None
        if reason is not None:
            request.reject(pb.ERROR_KIND_INVALID, reason, request.submit.grammar.param)
        else:
            self._playing[request] = (outputs(request), len(request.resumed_ids))
            self._work.set()

    async def _write(self, connection: FakeConnection, context: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat):
                    item = await connection._outgoing.get()
            except TimeoutError:
                item = pb.EngineFrame()
            await self._speaking.wait()
            if isinstance(item, tuple):
                if item[0] is not grpc.StatusCode.OK:
                    await context.abort(*item)
                return
            await context.write(item)

    async def _play(self, outputs: Callable[[FakeRequest], Sequence[int]]) -> None:
        while True:
            self._work.clear()
            if not self._playing:
                await self._work.wait()
            self.step(self._next_rows())
            await asyncio.sleep(self._step_seconds)

    def _next_rows(self) -> list[Row]:
        rows = []
        for request, (ids, position) in list(self._playing.items()):
            if request.over:
                del self._playing[request]
                continue
            rows.append(self._next_row(request, ids, position))
            if rows[-1].finish is not None:
                del self._playing[request]
        return rows

    def _next_row(self, request: FakeRequest, ids: Sequence[int], position: int) -> Row:
        sampling = request.submit.sampling
        if request.submit.pooling != pb.POOLING_NONE:
            return request.row(finish=STOP, pooled=self._pooled, cached=self._cached)
        first = position == len(request.resumed_ids)
        if first and sampling.HasField("prompt_logprobs"):
            # In two runs, of which the second repeats the end of the first, as after a preemption.
            last = len(request.prompt_ids) - 1
            half = last // 2
            request.send_prompt_scores(1, half)
            request.send_prompt_scores(max(half, 1), last - max(half, 1) + 1)
        if position == len(ids):
            return request.row(finish=STOP, cached=self._cached)
        token = ids[position]
        stops = token in sampling.stop_token_ids or token in sampling.eos_token_ids
        last_one = position + 1 == sampling.max_tokens
        self._playing[request] = (ids, position + 1)
        return request.row(
            token,
            finish=STOP if stops else LENGTH if last_one else None,
            stop_id=token if stops else -1,
            cached=self._cached,
            starts=self._cached if first else None,
            scores=[scored(position, token, sampling.logprobs)] if sampling.HasField("logprobs") else None,
        )

    def _notify(self) -> None:
        event, self._change = self._change, asyncio.Event()
        event.set()


def ids_column(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Returns ids as the int32 column that requests carry."""
    return np.array(ids, np.int32)
