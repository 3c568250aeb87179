"""The duplex stream to one core: connected, kept alive, and connected again for as long as it runs.

    CONNECTING ──Welcome──▶ READY ──Draining──▶ DRAINING
        ▲  ▲                  │                    │
        │  └────── lost ──────┴────────────────────┘        lost: every generation on it goes to its owner
        │
        └─▶ REFUSED   the core speaks no version that this front end speaks; tried again at the longest interval

A connection is one gRPC channel and one call. It is lost when either side closes it, when the transport fails, when a
frame breaks the protocol, or when the core is silent for too long.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from tercet_frontend.cores.backoff import Backoff
from tercet_frontend.cores.blocks import block_batches
from tercet_frontend.cores.connection import UnreachableError, open_channel, reach
from tercet_frontend.cores.frames import CoreInfo, CoreStats
from tercet_frontend.cores.generation import StreamGeneration
from tercet_frontend.cores.journey import Loss
from tercet_frontend.cores.migration import queue_time_left
from tercet_frontend.cores.options import OLDEST_PROTOCOL, PROTOCOL_VERSION, StreamOptions
from tercet_frontend.cores.outbox import Outbox, encoded_size
from tercet_frontend.cores.submission import submit_message
from tercet_frontend.cores.table import GenerationTable
from tercet_proto.v1 import engine_pb2, engine_pb2_grpc
from tercet_shared.errors import InvalidRequestError, LinkError, ProtocolError, UnavailableError
from tercet_shared.silence import until_silent

if TYPE_CHECKING:
    from tercet_frontend.cores.generation import Placement
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_shared.registry.interface import BlockSink

logger = logging.getLogger(__name__)

_MIN_TIME_LEFT = 0.001
"""Seconds; 0 would say that there is no deadline."""


class CoreState(Enum):
    """Where the stream stands; see the module."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"


class _IncompatibleError(LinkError):
    """The core cannot be used by this front end, however often it is asked."""


class _VersionError(_IncompatibleError):
    """The core does not speak the version that was offered to it."""


class _SilentError(LinkError):
    """Nothing has come for too long."""


class StreamOwner(Protocol):
    """Who holds streams. All calls return at once."""

    def changed(self, stream: CoreStream) -> None:
        """What `CoreStream.state`, `CoreStream.info` or `CoreStream.not_ready_reason` say has changed."""

    def reported(self, stream: CoreStream) -> None:
        """`CoreStream.stats` are new."""

    def lost(self, generation: StreamGeneration, stream: CoreStream, loss: Loss, reason: str) -> None:
        """A choice is not on the stream any more, and has not ended."""

    def idle(self, stream: CoreStream) -> None:
        """Nothing is on the stream any more."""


class CoreStream:
    """See the module. Building it starts nothing; `run` does.

    Args:
        address: ``host:port`` or ``unix:/path``.
        frontend_id: name of this front end, for the core's logs.
        options: intervals and limits.
        owner: is told what happens.
        sink: wants to know what the core has cached; None does not ask for it.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        options: StreamOptions,
        owner: StreamOwner,
        sink: BlockSink | None = None,
    ) -> None:
        self.address = address
        self.state = CoreState.CONNECTING
        self.info: CoreInfo | None = None
        self.stats = CoreStats()
        self._frontend_id = frontend_id
        self._options = options
        self._owner = owner
        self._sink = sink
        self._reason = f"The core at {address} is not connected yet."
        self._table = GenerationTable(self._lost, options.pace)
        self._outbox = Outbox()
        self._handles = 0
        self._frames = 0
        self._offered = PROTOCOL_VERSION
        self._welcomed = False  # on this connection
        self._leaving = "The front end is stopping."

    @property
    def core_id(self) -> str:
        """Name of the core; empty before the first Welcome."""
        return self.info.core_id if self.info is not None else ""

    @property
    def active(self) -> int:
        """Generations of this front end on the core."""
        return len(self._table)

    def not_ready_reason(self) -> str | None:
        """Returns why nothing can be submitted now, in one sentence, or None."""
        return None if self.state is CoreState.READY else self._reason

    def submit(self, request: GenerationRequest, placement: Placement) -> StreamGeneration:
        """Queues a request for the core and returns at once.

        Args:
            request: the request.
            placement: is told when it begins and ends here.

        Raises:
            UnavailableError: the stream is not ready.
            InvalidRequestError: the request is larger than the core accepts.
        """
        handle = self._enqueue(submit_message(request, self._handles + 1, queue_timeout=request.queue_timeout))
        generation = StreamGeneration(request, self, handle, placement)
        self._table.add(generation)
        return generation

    def resubmit(self, generation: StreamGeneration, placement: Placement) -> None:
        """Queues a choice that lost its core, to go on after the tokens that came; as `submit` otherwise."""
        left = queue_time_left(generation, asyncio.get_running_loop().time())
        submit = submit_message(
            generation.request,
            self._handles + 1,
            attempt=generation.attempt + 1,
            resumed=generation.received,
            queue_timeout=0.0 if left is None else max(left, _MIN_TIME_LEFT),
        )
        generation.arrive(self, self._enqueue(submit), placement)
        self._table.add(generation)

    def _enqueue(self, submit: engine_pb2.Submit) -> int:
        if self.state is not CoreState.READY:
            raise UnavailableError(self._reason)
        size, limit = encoded_size(submit), self._frame_limit()
        if size > limit:
            raise InvalidRequestError(f"The request takes {size} bytes; a core accepts at most {limit}.")
        self._handles += 1
        self._outbox.submit(submit)
        return self._handles

    def finish(self, generation: StreamGeneration, output_tokens: int) -> None:
        """See `GenerationLink`."""
        self._table.remove(generation)
        if not self._outbox.withdraw(generation.handle):
            self._outbox.finish(generation.handle, generation.attempt, output_tokens)
        self._check_idle()

    def abort(self, generation: StreamGeneration, reason: str) -> None:
        """See `GenerationLink`."""
        self._table.remove(generation)
        if not self._outbox.withdraw(generation.handle):
            self._outbox.abort(generation.handle, generation.attempt, reason)
        self._check_idle()

    def hand_over(self, reason: str) -> None:
        """Gives every choice to the owner: the core cannot go on with them for now, and another one can."""
        loss = Loss.RENEWED if self.stats.worker_left else Loss.STALLED
        for generation in self._table.take_all():
            if not self._outbox.withdraw(generation.handle):
                self._outbox.abort(generation.handle, generation.attempt, "moved to another core")
            self._owner.lost(generation, self, loss, reason)
        self._owner.idle(self)

    def _check_idle(self) -> None:
        if not len(self._table):
            self._owner.idle(self)

    async def run(self) -> None:
        """Keeps the stream connected until it is cancelled, which gives what still runs on it to its owner."""
        options = self._options
        backoff = Backoff(options.backoff_first, options.backoff_limit)
        clock = asyncio.get_running_loop().time
        try:
            while True:
                begin = clock()
                try:
                    await self._connection()
                except _IncompatibleError as error:
                    self._log(error)
                    self._leave(CoreState.REFUSED, error.message, Loss.BROKEN)
                    backoff.exhaust()
                except LinkError as error:
                    self._log(error)
                    if clock() - begin > options.heartbeat_timeout and self.state is not CoreState.CONNECTING:
                        backoff.reset()
                    loss = Loss.SILENT if isinstance(error, _SilentError) else Loss.BROKEN
                    self._leave(CoreState.CONNECTING, error.message, loss)
                await asyncio.sleep(backoff.wait())
        finally:
            self._leave(CoreState.CONNECTING, self._leaving, Loss.DRAINED)

    def _log(self, error: LinkError) -> None:
        level = logging.DEBUG if error.message == self._reason else logging.WARNING  # once, not at every attempt
        why = f" {error.why}" if isinstance(error, UnreachableError) else ""
        logger.log(level, "%s (core id: %s)%s", error.message, self.core_id or "not known", why)

    def _leave(self, state: CoreState, reason: str, loss: Loss) -> None:
        if self.state is CoreState.DRAINING:
            loss = Loss.DRAINED
        self.state, self._reason = state, reason
        unwritten = self._outbox.clear()
        for generation in self._table.take_all():
            self._lost(generation, Loss.UNSENT if generation.handle in unwritten else loss, reason)
        if self._welcomed and self._sink is not None:
            self._sink.forget(self.core_id)
        self._welcomed = False
        self._owner.changed(self)
        self._owner.idle(self)

    def _lost(self, generation: StreamGeneration, loss: Loss, reason: str) -> None:
        if loss is Loss.ENDED and self.state is CoreState.DRAINING:
            loss = Loss.DRAINED
        self._owner.lost(generation, self, loss, reason)

    async def _connection(self) -> None:
        """Connects and serves one connection. Always raises `LinkError`, when it is lost, unless it is cancelled."""
        channel = open_channel(self.address, self._options)
        try:
            await reach(channel, self.address, within=self._options.connect_timeout)
            stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
            for version in range(PROTOCOL_VERSION, OLDEST_PROTOCOL - 1, -1):
                self._offered = version
                try:
                    await self._call(stub.Connect())
                except _VersionError:
                    if version == OLDEST_PROTOCOL:
                        raise
        finally:
            await channel.close(None)

    async def _call(self, call: Any) -> None:
        # Not a TaskGroup: up to Python 3.12, one that fails while it is cancelled forgets the cancellation.
        tasks = [asyncio.create_task(part) for part in (self._read(call), self._write(call), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            # The reader knows best what happened; the others may have noticed it first.
            failures = [task.exception() for task in tasks if task.done()]
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise next(failure for failure in failures if failure is not None)

    async def _read(self, call: Any) -> None:
        while True:
            try:
                frame = await call.read()
            except grpc.aio.AioRpcError as error:
                raise self._failure(error) from error
            if frame is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                # The end of the messages; the status says why.
                raise self._ending(await call.code(), await call.details())
            self._frames += 1
            if frame.HasField("welcome"):
                self._welcome(frame.welcome)
            elif not self._welcomed and frame.ByteSize():
                raise ProtocolError(f"The core at {self.address} did not begin with a Welcome.")
            self._apply(frame)

    def _apply(self, frame: engine_pb2.EngineFrame) -> None:
        for run in frame.prompt_logprobs:  # first: a step in the same frame may have the first token
            self._table.prompt_logprobs(run)
        if frame.HasField("step"):
            self._table.step(frame.step)
        for rejected in frame.rejected:
            self._table.reject(rejected)
        if frame.HasField("block_events") and self._sink is not None and self.info is not None:
            for batch in block_batches(frame.block_events):
                self._sink.blocks(self.info.core_id, self.info.incarnation, batch)
        if frame.HasField("stats"):
            self.stats = CoreStats.of(frame.stats)
            self._owner.reported(self)
        if frame.HasField("draining"):
            self.state = CoreState.DRAINING
            self._reason = f"The core at {self.address} takes no new requests: {frame.draining.reason or 'draining'}."
            logger.info("%s (core id: %s)", self._reason, self.core_id)
            self._owner.changed(self)
        self._check_idle()

    def _welcome(self, welcome: engine_pb2.Welcome) -> None:
        if not OLDEST_PROTOCOL <= welcome.protocol <= self._offered:
            raise _IncompatibleError(
                f"The core at {self.address} speaks version {welcome.protocol} of the protocol, "
                f"this front end versions {OLDEST_PROTOCOL} to {self._offered}."
            )
        self.info = CoreInfo.of(welcome)
        self._welcomed = True
        if self.state is not CoreState.DRAINING:
            self.state = CoreState.READY
            logger.info("The core at %s serves %s (core id: %s)", self.address, self.info.model_name, self.core_id)
        self._owner.changed(self)

    async def _write(self, call: Any) -> None:
        frame = engine_pb2.ClientFrame(hello=self._hello())
        while True:
            try:
                await call.write(frame)
            except grpc.aio.AioRpcError as error:
                raise self._failure(error) from error
            except asyncio.InvalidStateError:
                return  # the call is over; the reader learns why
            await self._outbox.wait(self._options.heartbeat_interval)
            frame = self._outbox.take(self._frame_limit())

    def _hello(self) -> engine_pb2.Hello:
        if self._offered == OLDEST_PROTOCOL:  # as it was then
            return engine_pb2.Hello(frontend_id=self._frontend_id, protocol=OLDEST_PROTOCOL)
        return engine_pb2.Hello(
            frontend_id=self._frontend_id,
            protocol=PROTOCOL_VERSION,
            oldest_protocol=OLDEST_PROTOCOL,
            block_events=self._sink is not None,
        )

    async def _watch(self) -> None:
        """Raises `LinkError` after silence."""
        options = self._options
        await until_silent(
            lambda: self._frames, timeout_s=options.heartbeat_timeout, interval_s=options.heartbeat_interval
        )
        raise _SilentError(f"The core at {self.address} has been silent for {options.heartbeat_timeout:g} s.")

    def _frame_limit(self) -> int:
        limit = self._options.max_message_bytes
        return min(self.info.max_submit_bytes or limit, limit) if self.info is not None else limit

    def _failure(self, error: grpc.aio.AioRpcError) -> LinkError:
        return self._ending(error.code(), error.details())

    def _ending(self, code: grpc.StatusCode, details: str | None) -> LinkError:
        if code is grpc.StatusCode.OK:
            return LinkError(f"The core at {self.address} closed the stream.")
        kind = LinkError
        if code is grpc.StatusCode.FAILED_PRECONDITION and not self._welcomed:
            kind = _VersionError
        return kind(f"The core at {self.address} ended the stream: {details or code.name}.")
