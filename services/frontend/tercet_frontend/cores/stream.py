"""The duplex stream to one core: connected, kept alive, and connected again for as long as it runs.

    CONNECTING ──Welcome──▶ READY ──Draining──▶ DRAINING
        ▲  ▲                  │                    │
        │  └────── lost ──────┴────────────────────┘        lost: every generation on it ends with an error
        │
        └─▶ REFUSED   the core's Welcome does not suit this front end; tried again at the longest interval

A connection is one gRPC channel and one call. It is lost when either side closes it, when the transport fails, when a
frame breaks the protocol, or when the core is silent for too long.
"""

from __future__ import annotations

import asyncio
import logging
import math
from enum import Enum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tercet_frontend.cores.backoff import Backoff
from tercet_frontend.cores.frames import CoreInfo, CoreStats, submit_message
from tercet_frontend.cores.generation import StreamGeneration
from tercet_frontend.cores.options import PROTOCOL_VERSION, StreamOptions
from tercet_frontend.cores.outbox import Outbox, encoded_size
from tercet_frontend.cores.table import GenerationTable
from tercet_proto.v1 import engine_pb2, engine_pb2_grpc
from tercet_shared.errors import InvalidRequestError, LinkError, ProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.cores.interface import GenerationRequest

logger = logging.getLogger(__name__)

_LOST = "The core that ran this request is gone."


class CoreState(Enum):
    """Where the stream stands; see the module."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"


class _IncompatibleError(LinkError):
    """The core cannot be used by this front end, however often it is asked."""


class CoreStream:
    """See the module. Building it starts nothing; `run` does.

    Args:
        address: ``host:port`` or ``unix:/path``.
        frontend_id: name of this front end, for the core's logs.
        tokenizer_fingerprint: of this front end's tokenizer; a core with another one is refused.
        options: intervals and limits.
        changed: called whenever what `not_ready_reason` or `info` say has changed.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        tokenizer_fingerprint: str,
        options: StreamOptions,
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.state = CoreState.CONNECTING
        self.info: CoreInfo | None = None
        self.stats = CoreStats()
        self._frontend_id = frontend_id
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._options = options
        self._changed = changed
        self._reason = f"The core at {address} is not connected yet."
        self._table = GenerationTable()
        self._outbox = Outbox()
        self._others = 0  # requests of other front ends, by the latest Stats
        self._handles = 0
        self._frames = 0

    @property
    def core_id(self) -> str:
        """See `Candidate`; empty before the first Welcome."""
        return self.info.core_id if self.info is not None else ""

    @property
    def incarnation(self) -> str:
        """See `Candidate`; empty before the first Welcome."""
        return self.info.incarnation if self.info is not None else ""

    @property
    def slots(self) -> int:
        """See `Candidate`."""
        return max(self.info.max_slots, 1) if self.info is not None else 1

    @property
    def load(self) -> int:
        """See `Candidate`: what others had there at the latest Stats, and what this front end has there now."""
        return self._others + len(self._table)

    @property
    def active(self) -> int:
        """Generations of this front end on the core."""
        return len(self._table)

    def not_ready_reason(self) -> str | None:
        """Returns why nothing can be submitted now, in one sentence, or None."""
        return None if self.state is CoreState.READY else self._reason

    def submit(self, request: GenerationRequest) -> StreamGeneration:
        """Queues a request for the core and returns at once.

        Raises:
            UnavailableError: the stream is not ready.
            InvalidRequestError: the request is larger than the core accepts.
        """
        if self.state is not CoreState.READY:
            raise UnavailableError(self._reason)
        submit = submit_message(request, self._handles + 1)
        size, limit = encoded_size(submit), self._frame_limit()
        if size > limit:
            raise InvalidRequestError(f"The request takes {size} bytes; a core accepts at most {limit}.")
        self._handles += 1
        generation = StreamGeneration(request, self, self._handles)
        self._table.add(generation)
        self._outbox.submit(submit)
        return generation

    def finish(self, generation: StreamGeneration, output_tokens: int) -> None:
        """See `GenerationLink`."""
        self._table.remove(generation)
        if not self._outbox.withdraw(generation.handle):
            self._outbox.finish(generation.handle, generation.attempt, output_tokens)

    def abort(self, generation: StreamGeneration, reason: str) -> None:
        """See `GenerationLink`."""
        self._table.remove(generation)
        if not self._outbox.withdraw(generation.handle):
            self._outbox.abort(generation.handle, generation.attempt, reason)

    async def run(self) -> None:
        """Keeps the stream connected until it is cancelled, which ends what still runs on it with an error."""
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
                    self._leave(CoreState.REFUSED, error.message)
                    backoff.exhaust()
                except LinkError as error:
                    self._log(error)
                    if clock() - begin > options.heartbeat_timeout and self.state is not CoreState.CONNECTING:
                        backoff.reset()
                    self._leave(CoreState.CONNECTING, error.message)
                await asyncio.sleep(backoff.wait())
        finally:
            self._leave(CoreState.CONNECTING, "The front end is stopping.")

    def _log(self, error: LinkError) -> None:
        level = logging.DEBUG if error.message == self._reason else logging.WARNING  # once, not at every attempt
        logger.log(level, "%s (core id: %s)", error.message, self.core_id or "not known")

    def _leave(self, state: CoreState, reason: str) -> None:
        self.state, self._reason = state, reason
        self._outbox.clear()
        self._table.fail_all(_LOST)
        self._others = 0
        self._changed()

    async def _connection(self) -> None:
        """Connects and serves one connection. Always raises `LinkError`, when it is lost, unless it is cancelled."""
        channel = grpc.aio.insecure_channel(self.address, options=self._options.channel_arguments())
        try:
            await self._reach(channel)
            call = engine_pb2_grpc.EngineStub(channel).Connect()  # type: ignore[no-untyped-call]
            await self._call(call)
        finally:
            await channel.close(None)

    async def _reach(self, channel: grpc.aio.Channel) -> None:
        ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                while (state := channel.get_state(try_to_connect=True)) is not ready:
                    if state is failed:
                        raise LinkError(f"The core at {self.address} cannot be reached.")
                    await channel.wait_for_state_change(state)
        except TimeoutError as error:
            raise LinkError(f"The core at {self.address} cannot be reached.") from error

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
        welcomed = False
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
                welcomed = True
            elif not welcomed and frame.ByteSize():
                raise ProtocolError(f"The core at {self.address} did not begin with a Welcome.")
            self._apply(frame)

    def _apply(self, frame: engine_pb2.EngineFrame) -> None:
        for run in frame.prompt_logprobs:  # first: a step in the same frame may have the first token
            self._table.prompt_logprobs(run)
        if frame.HasField("step"):
            self._table.step(frame.step)
        for rejected in frame.rejected:
            self._table.reject(rejected)
        if frame.HasField("stats"):
            self.stats = CoreStats.of(frame.stats)
            self._others = max(self.stats.running + self.stats.waiting - len(self._table), 0)
        if frame.HasField("draining"):
            self.state = CoreState.DRAINING
            self._reason = f"The core at {self.address} takes no new requests: {frame.draining.reason or 'draining'}."
            logger.info("%s (core id: %s)", self._reason, self.core_id)
            self._changed()

    def _welcome(self, welcome: engine_pb2.Welcome) -> None:
        if welcome.protocol != PROTOCOL_VERSION:
            raise _IncompatibleError(
                f"The core at {self.address} speaks version {welcome.protocol} of the protocol, "
                f"this front end version {PROTOCOL_VERSION}."
            )
        if welcome.tokenizer_fingerprint != self._tokenizer_fingerprint:
            raise _IncompatibleError(
                f"The core at {self.address} serves a model whose tokenizer differs from this front end's."
            )
        self.info = CoreInfo.of(welcome)
        if self.state is not CoreState.DRAINING:
            self.state = CoreState.READY
            logger.info("The core at %s serves %s (core id: %s)", self.address, self.info.model_name, self.core_id)
        self._changed()

    async def _write(self, call: Any) -> None:
        frame = engine_pb2.ClientFrame(hello=engine_pb2.Hello(frontend_id=self._frontend_id, protocol=PROTOCOL_VERSION))
        while True:
            try:
                await call.write(frame)
            except grpc.aio.AioRpcError as error:
                raise self._failure(error) from error
            except asyncio.InvalidStateError:
                return  # the call is over; the reader learns why
            await self._outbox.wait(self._options.heartbeat_interval)
            frame = self._outbox.take(self._frame_limit())

    async def _watch(self) -> None:
        """Raises `LinkError` after silence.

        It counts intervals instead of looking at the clock: after a pause of this process itself, what the core sent
        meanwhile is read before the next interval ends.
        """
        options = self._options
        allowed = max(math.ceil(options.heartbeat_timeout / options.heartbeat_interval), 1)
        silent, seen = 0, self._frames
        while silent < allowed:
            await asyncio.sleep(options.heartbeat_timeout / allowed)
            silent = silent + 1 if self._frames == seen else 0
            seen = self._frames
        raise LinkError(f"The core at {self.address} has been silent for {options.heartbeat_timeout:g} s.")

    def _frame_limit(self) -> int:
        limit = self._options.max_message_bytes
        return min(self.info.max_submit_bytes or limit, limit) if self.info is not None else limit

    def _failure(self, error: grpc.aio.AioRpcError) -> LinkError:
        return self._ending(error.code(), error.details())

    def _ending(self, code: grpc.StatusCode, details: str | None) -> LinkError:
        if code is grpc.StatusCode.OK:
            return LinkError(f"The core at {self.address} closed the stream.")
        return LinkError(f"The core at {self.address} ended the stream: {details or code.name}.")
