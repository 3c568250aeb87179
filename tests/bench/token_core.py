"""A core that computes nothing, in a process of its own: every request gets token after token of a fixed text.

    python -m tests.bench.token_core MODEL --listen unix:/path [--gather 128] [--rate 20000]

It keeps the contract of the stream (one frame per step and front end, columns) at the least cost, so that what is
measured is the front end: state is columns, and a step of a thousand rows takes about a tenth of a millisecond. Writes
are awaited, so gRPC's flow control slows it down where the front end does not read. With --gather it waits, whenever it
was idle, until so many requests are there: else it would answer each before the next has come, and streams would never
run at the same time. It prints a line once it listens, and one for each front end that has said Hello.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from typing import Any

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import uvloop

from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc
from tercet_shared.checkpoint import Checkpoint

TEXT = (
    "The lighthouse keeper counted the waves and wrote them down in a book. Nobody had asked him to; it was what the "
    "nights were for. In the morning he read the numbers to the gulls, who had heard larger ones, and went to sleep. "
)
HEARTBEAT_S = 0.5
GATHER_S = 1.0
"""For so long requests that are still missing are waited for."""
BURST_S = 0.02
"""So much of the time that it fell behind its rate is made up for."""
MAX_FRAME = 64 * 1024 * 1024


class Rows:
    """The running requests of one front end, as columns in the order in which they came."""

    def __init__(self, text: npt.NDArray[np.int32]) -> None:
        self._text = text
        self._handles = np.empty(0, "<u8")
        self._attempts = np.empty(0, "<u4")
        self._done = np.empty(0, np.int64)  # tokens sent
        self._limits = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, submits: list[pb.Submit]) -> None:
        """Takes requests, after what earlier attempts of them yielded."""
        self._handles = np.append(self._handles, np.array([s.handle for s in submits], "<u8"))
        self._attempts = np.append(self._attempts, np.array([s.attempt for s in submits], "<u4"))
        self._done = np.append(self._done, [len(s.resumed_ids) // 4 for s in submits])
        self._limits = np.append(self._limits, [s.sampling.max_tokens for s in submits])

    def remove(self, handles: list[int]) -> None:
        """Drops requests that the front end gave up."""
        self._keep(~np.isin(self._handles, np.array(handles, "<u8")))

    def step(self) -> pb.EngineFrame:
        """Returns the frame with the next token of every request; those that are complete end with it."""
        n = len(self)
        first = np.flatnonzero(self._done == 0).astype("<i4")
        ids = self._text[self._done % len(self._text)]
        self._done += 1
        ended = self._done >= self._limits
        ends = np.flatnonzero(ended).astype("<i4")
        step = pb.Step(
            handles=self._handles.tobytes(),
            attempts=self._attempts.tobytes(),
            token_offsets=np.arange(n + 1, dtype="<i4").tobytes(),
            token_ids=ids.tobytes(),
            start_rows=first.tobytes(),
            start_cached=np.zeros(len(first), "<i4").tobytes(),
        )
        if len(ends):
            step.finish_rows = ends.tobytes()
            step.finish_reasons = np.full(len(ends), pb.FINISH_REASON_LENGTH, np.uint8).tobytes()
            step.finish_stop_ids = np.full(len(ends), -1, "<i4").tobytes()
            step.finish_cached = np.zeros(len(ends), "<i4").tobytes()
            self._keep(~ended)
        return pb.EngineFrame(step=step)

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self._handles, self._attempts = self._handles[kept], self._attempts[kept]
        self._done, self._limits = self._done[kept], self._limits[kept]


class TokenCore(engine_pb2_grpc.EngineServicer):
    """See the module.

    Args:
        welcome: what front ends are told.
        text: int32 token ids that are sent again and again.
        rate: tokens per second over all requests of a front end; 0 sends as fast as the front end reads.
        gather: requests that it waits for before it begins.
    """

    def __init__(self, welcome: pb.Welcome, text: npt.NDArray[np.int32], rate: float, gather: int) -> None:
        self._welcome = welcome
        self._gather = gather
        self._text = text
        self._rate = rate

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # noqa: N802  # gRPC's name
        rows, work = Rows(self._text), asyncio.Event()
        await context.write(pb.EngineFrame(welcome=self._welcome))
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send(rows, work, context))
            async for frame in request_iterator:
                if frame.HasField("hello"):
                    print("connected", flush=True)
                if frame.aborts or frame.finishes:
                    rows.remove([end.handle for end in (*frame.aborts, *frame.finishes)])
                if frame.submits:
                    rows.add(list(frame.submits))
                    work.set()
            sending.cancel()

    async def _send(self, rows: Rows, work: asyncio.Event, context: Any) -> None:
        due = 0.0
        while True:
            if not len(rows):
                await self._begin(rows, work, context)
            count = len(rows)
            await context.write(rows.step())
            if self._rate:
                due = max(due + count / self._rate, time.monotonic() - BURST_S)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _begin(self, rows: Rows, work: asyncio.Event, context: Any) -> None:
        """Returns when there are requests enough; keeps the stream alive meanwhile."""
        while not len(rows):
            work.clear()
            try:
                await asyncio.wait_for(work.wait(), HEARTBEAT_S)
            except TimeoutError:
                await context.write(pb.EngineFrame())
        try:
            async with asyncio.timeout(GATHER_S):
                while len(rows) < self._gather:
                    work.clear()
                    await work.wait()
        except TimeoutError:
            pass


async def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens per second; 0: as fast as they are read")
    parser.add_argument("--gather", type=int, default=1, help="requests that it waits for before it begins")
    parser.add_argument("--max-model-len", type=int, default=8_192, help="tokens of a request that it allows")
    options = parser.parse_args()
    checkpoint = Checkpoint.open(options.model)
    tokenizer = checkpoint.tokenizer
    welcome = pb.Welcome(
        protocol=1, core_id="tokens", incarnation="1", model_name=checkpoint.served_name, model_fingerprint="none",
        tokenizer_fingerprint=tokenizer.fingerprint, vocab_size=checkpoint.config.vocab_size, block_size=16,
        num_blocks=1 << 20, max_slots=1 << 16, max_model_len=options.max_model_len, max_submit_bytes=MAX_FRAME,
    )  # fmt: skip
    text = np.array(tokenizer.encode(TEXT, add_special_tokens=False), "<i4")
    limits = [("grpc.max_send_message_length", MAX_FRAME), ("grpc.max_receive_message_length", MAX_FRAME)]
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *limits])
    service = TokenCore(welcome, text, options.rate, options.gather)
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(options.listen)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("listening", flush=True)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main())
