"""One front end's stream: its requests in, its tokens out, and what happens when either side falls silent."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn, Protocol

import grpc

from tercet_core.streams.block_feed import BlockFeed
from tercet_core.streams.encoding import rejected, request_from
from tercet_core.streams.outbox import Outbox
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import OverloadedError, RequestError, TercetError, UnavailableError
from tercet_shared.silence import until_silent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tercet_core.scheduling.outputs import Output
    from tercet_core.scheduling.request import FrontEnd, Request
    from tercet_shared.registry.blocks import BlockLog

_log = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
"""The newest version of the stream that this core speaks."""

STATS_INTERVAL = 0.02
"""Least seconds between two looks at the core's numbers that a front end gets: a token is not kept waiting for them."""

OLDEST_PROTOCOL = 1
"""The oldest. What came with a later one are fields that an older peer neither sends nor misses."""


class FrameContext(Protocol):
    """What is used of ``grpc.aio.ServicerContext``, whose types leave out that `read` may return its end marker."""

    async def read(self) -> pb.ClientFrame | object:
        """Returns the next frame, or ``grpc.aio.EOF``."""

    async def write(self, message: pb.EngineFrame) -> None:
        """Sends a frame; waits while the stream is busy."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Ends the stream with a status."""


class Host(Protocol):
    """What a stream needs of the core that it belongs to."""

    model_fingerprint: str

    @property
    def draining(self) -> str:
        """Why no new requests are taken, or empty."""

    def block_log(self) -> BlockLog:
        """Returns where block events are; there is a worker by now."""

    async def welcome(self) -> pb.Welcome:
        """Waits until the worker is there and returns what front ends are told about this core."""

    def stats(self) -> pb.Stats:
        """Returns the current numbers."""

    def submit(self, request: Request) -> None:
        """Takes a request. Raises `RequestError` or `UnavailableError`."""

    def end(self, requests: list[Request], reason: str) -> None:
        """Ends requests, for a reason in one word; those that ended already are left alone."""

    def rejected(self, error: TercetError) -> None:
        """Hears that a request was not taken."""


class FrontEndConnection:
    """The state of one stream. `serve` runs it to its end; then all its requests have ended."""

    def __init__(self, number: FrontEnd, host: Host, *, heartbeat_interval: float, heartbeat_timeout: float) -> None:
        self.number = number
        self.name = "?"
        self.outbox = Outbox()
        self._host = host
        self._interval = heartbeat_interval
        self._timeout = heartbeat_timeout
        self._requests: dict[int, Request] = {}
        self._frames = 0
        self._cut = asyncio.Event()
        self._closing = False
        self._protocol = PROTOCOL_VERSION
        self._wants_blocks = False
        self._blocks: BlockFeed | None = None

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def publish(self, output: Output) -> None:
        """Queues the rows of a step; a front end that has stopped reading is cut off."""
        for end in output.ends:
            self._requests.pop(int(output.handles[end.row]), None)
        self.outbox.put(output)
        if self.outbox.overflowed:
            self._cut.set()

    def renew(self, welcome: pb.Welcome) -> None:
        """Tells the front end that the core is not what it was."""
        self.outbox.put_frame(pb.EngineFrame(welcome=self._own(welcome)))

    def close(self) -> None:
        """Ends the stream once what waits in the outbox has been written."""
        self._closing = True
        self.outbox.wake()

    async def serve(self, context: FrameContext) -> None:
        """Runs the stream until either side ends it, falls silent, or stops reading."""
        try:
            async with asyncio.timeout(self._timeout):
                first = await context.read()
            if not isinstance(first, pb.ClientFrame):  # the end of the stream
                return
            if not first.HasField("hello"):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be Hello")
            self._protocol = _common_protocol(first.hello)
            if not self._protocol:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this core speaks versions {OLDEST_PROTOCOL} to {PROTOCOL_VERSION} of the stream, the front end "
                    f"{first.hello.oldest_protocol or first.hello.protocol} to {first.hello.protocol}",
                )
            self._wants_blocks = first.hello.block_events
            self.name = first.hello.frontend_id
            _log.info("front end %s connected", self.name)
            await self._exchange(context)
        except TimeoutError:
            _log.warning("front end %s has been silent for %g s and counts as gone", self.name, self._timeout)
        except grpc.aio.InternalError as error:  # and gRPC would log it as a fault of ours
            _log.debug("the stream of front end %s was over when it was used: %s", self.name, error)
        finally:
            _log.info("front end %s left, %d requests ended with it", self.name, self._end_requests())

    def _end_requests(self) -> int:
        lost = list(self._requests.values())
        self._requests.clear()
        self._host.end(lost, "disconnect")
        return len(lost)

    async def _exchange(self, context: FrameContext) -> None:
        tasks = {
            asyncio.create_task(self._read(context), name="read frames"),
            asyncio.create_task(self._write(context), name="write frames"),
            asyncio.create_task(self._watch(), name="watch for silence"),
            asyncio.create_task(self._cut.wait(), name="wait for overflow"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        if self._cut.is_set():
            # First of all: the status queues behind what is not read, perhaps for as long as the front end exists.
            ended = self._end_requests()
            _log.error("front end %s does not read its stream; its %d requests are aborted", self.name, ended)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the front end does not read its stream")

    async def _read(self, context: FrameContext) -> None:
        while True:
            frame = await context.read()
            if not isinstance(frame, pb.ClientFrame):  # EOF
                return
            self._frames += 1
            self._take(frame)

    async def _watch(self) -> None:
        """Raises `TimeoutError` after silence."""
        await until_silent(lambda: self._frames, timeout_s=self._timeout, interval_s=self._interval)
        raise TimeoutError

    def _take(self, frame: pb.ClientFrame) -> None:
        self._leave(frame.aborts, "abort")
        self._leave(frame.finishes, "stop_string")
        for submit in frame.submits:
            try:
                self._submit(submit)
            except (RequestError, UnavailableError) as error:
                self._host.rejected(error)
                self.outbox.put_frame(pb.EngineFrame(rejected=[rejected(submit.handle, submit.attempt, error)]))

    def _leave(self, items: Iterable[pb.Abort] | Iterable[pb.Finish], reason: str) -> None:
        ended = [request for item in items if (request := self._find(item.handle, item.attempt)) is not None]
        for request in ended:
            self._requests.pop(request.handle, None)  # a frame may name it twice
        if ended:
            self._host.end(ended, reason)

    def _find(self, handle: int, attempt: int) -> Request | None:
        request = self._requests.get(handle)
        return request if request is not None and request.attempt == attempt else None

    def _submit(self, submit: pb.Submit) -> None:
        request = request_from(submit, self.number, self._host.model_fingerprint)
        older = self._requests.get(submit.handle)
        if older is not None:
            if older.attempt >= submit.attempt:
                raise RequestError("The handle is in use.", param="handle")
            self._host.end([older], "superseded")
            del self._requests[submit.handle]
        self._requests[submit.handle] = request  # before: it may end at once
        try:
            self._host.submit(request)
        except TercetError:
            del self._requests[submit.handle]
            raise
        if submit.queue_deadline_s > 0:
            asyncio.get_running_loop().call_later(submit.queue_deadline_s, self._expire, request)

    def _expire(self, request: Request) -> None:
        """Ends a request that has waited for its first step as long as it may."""
        if request.admitted or self._requests.get(request.handle) is not request:
            return
        del self._requests[request.handle]
        self._host.end([request], "expired")
        error = OverloadedError("The request has waited for its first step as long as it may.")
        self.outbox.put_frame(pb.EngineFrame(rejected=[rejected(request.handle, request.attempt, error)]))

    async def _write(self, context: FrameContext) -> None:
        await self._write_welcome(context)
        clock = asyncio.get_running_loop().time
        due, owed = 0.0, False
        while True:
            patience = min(max(due + STATS_INTERVAL - clock(), 0.0), self._interval) if owed else self._interval
            frames = await self.outbox.take(patience) or [pb.EngineFrame()]
            if self._blocks is not None:
                frames += self._block_frames(self._blocks)
            # What frames have left out goes with the next one that is due, or on its own where none follows.
            owed = clock() < due and not self._closing
            if not owed:
                frames[-1].stats.CopyFrom(self._host.stats())
                due = clock() + STATS_INTERVAL
            for frame in frames:
                await context.write(frame)
            if self._closing and not self.outbox.pending_rows:
                return

    async def _write_welcome(self, context: FrameContext) -> None:
        welcome = asyncio.ensure_future(self._host.welcome())
        try:
            while not (welcome.done() or self._closing):
                await asyncio.wait({welcome}, timeout=self._interval)
                if not welcome.done():
                    await context.write(pb.EngineFrame())  # alive, but without a worker so far
            if welcome.done():
                await context.write(pb.EngineFrame(welcome=self._own(welcome.result())))
                if self._host.draining:
                    await context.write(pb.EngineFrame(draining=pb.Draining(reason=self._host.draining)))
                if self._wants_blocks:
                    self._blocks = BlockFeed(self._host.block_log())
        finally:
            welcome.cancel()

    def _own(self, welcome: pb.Welcome) -> pb.Welcome:
        """Returns what this front end is told, in the version that it speaks."""
        own = pb.Welcome()
        own.CopyFrom(welcome)
        own.protocol = self._protocol
        return own

    @staticmethod
    def _block_frames(feed: BlockFeed) -> list[pb.EngineFrame]:
        return [pb.EngineFrame(block_events=events) for events in feed.take(asyncio.get_running_loop().time())]


def _common_protocol(hello: pb.Hello) -> int:
    """Returns the newest version that both sides speak, or 0 where there is none."""
    newest = min(hello.protocol, PROTOCOL_VERSION)
    oldest = max(hello.oldest_protocol or hello.protocol, OLDEST_PROTOCOL)
    return newest if newest >= oldest else 0
