"""The core's bookkeeping, measured without a worker: what plan and apply cost per step, and how many requests pass.

    python tests/bench/core.py                     steady decoding at 256, 1,024 and 4,096 requests, and a mixed load
    python tests/bench/core.py --through 100000    short requests through a core process, a worker that answers at once

Steady decoding: mixed lengths, block offsets spread evenly over the requests (so that hashing shows in every step),
prefix caching on, two steps in flight. One JSON object per size; the last line is the one for 1,024. Times are in
milliseconds per step: the mean, and the 99th percentile as ``*_p99``. ``encode_ms`` (plan frame, front ends' frames) is
part of the total and given apart too. ``calibrations`` is the total as a multiple of a fixed pure-Python loop that is
timed in the same run, so that figures of different machines and hours can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tercet_core.scheduling.request import FrontEnd, Request
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_core.streams.encoding import step_frames
from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc
from tercet_shared.hashing import root_key
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.frames import encode_plan
from tercet_shared.wire.step import StepPlan, StepResult
from tests.fakes.worker import FakeWorker

DEPTH = 2
VOCAB = 50_000
EOS = 2
FRAME_BYTES = 1024 * 1024


class Record:
    """One entry of the calibration loop's table."""

    __slots__ = ("a", "b", "c")

    def __init__(self, a: int) -> None:
        self.a, self.b, self.c = a, 0, []


def calibration_ms() -> float:
    """Returns the median time of the fixed loop: twenty passes over 1,024 small objects."""

    def work() -> None:
        table = {f"req-{i}": Record(i) for i in range(1024)}
        for _ in range(20):
            for record in table.values():
                record.b += record.a
                if record.b % 16 == 0:
                    record.c.append(record.b)
                else:
                    record.b = record.b + 1 - 1

    times = []
    for _ in range(15):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


@dataclass
class Times:
    """Seconds per step, by part."""

    apply: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Returns milliseconds."""
        total = [a + p + e for a, p, e in zip(self.apply, self.plan, self.encode, strict=True)]
        found = {}
        for name, values in (("plan", self.plan), ("apply", self.apply), ("encode", self.encode), ("total", total)):
            ordered = sorted(values)
            found[f"{name}_ms"] = round(statistics.fmean(values) * 1e3, 4)
            found[f"{name}_p99"] = round(ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)] * 1e3, 4)
        return found


class Bench:
    """A scheduler and a worker that exists only as a rule: random tokens, never the end of the sequence."""

    def __init__(self, running: int, *, blocks: int, budget: int, front_ends: int = 1) -> None:
        self.scheduler = Scheduler(
            Limits(
                max_slots=running, num_blocks=blocks, max_model_len=8192, max_batched_tokens=budget, vocab_size=VOCAB
            )
        )
        self.flight: deque[StepPlan] = deque()
        self.times = Times()
        self._draw = np.random.default_rng(0)
        self._front_ends = front_ends
        self._handle = 0
        self._root = root_key("bench")

    def submit(self, prompt_len: int, max_tokens: int) -> None:
        prompt = self._draw.integers(3, VOCAB, prompt_len, dtype=np.int32)
        self._handle += 1
        self.scheduler.submit(
            Request(
                front_end=FrontEnd(self._handle % self._front_ends),
                handle=self._handle,
                attempt=0,
                request_id=str(self._handle),
                prompt_len=prompt_len,
                tokens=prompt,
                params=SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,)),
                root=self._root,
            )
        )

    def result(self, plan: StepPlan) -> StepResult:
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.samples, out=offsets[1:])
        return StepResult(plan.step_id, offsets, self._draw.integers(3, VOCAB, int(offsets[-1]), dtype=np.int32))

    def step(self, *, measure: bool) -> None:
        """Applies the oldest step in flight, plans the next, and encodes what leaves the core."""
        result = self.result(self.flight.popleft()) if len(self.flight) == DEPTH else None
        begin = time.perf_counter()
        outputs = self.scheduler.apply(result) if result is not None else []
        applied = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        if plan is not None:
            encode_plan(plan)
        for output in outputs:
            for frame in step_frames(output, max_bytes=FRAME_BYTES):
                frame.SerializeToString()
        encoded = time.perf_counter()
        if plan is not None:
            self.flight.append(plan)
        if measure:
            self.times.apply.append(applied - begin)
            self.times.plan.append(planned - applied)
            self.times.encode.append(encoded - planned)


def steady(running: int, steps: int) -> dict[str, float]:
    """Returns the times of ``steps`` steps in which ``running`` requests decode."""
    bench = Bench(running, blocks=running * 64, budget=1_000_000)
    for i in range(running):
        bench.submit(48 + (i * 37) % 400 // 16 * 16 + i % 16, 4000)
    while bench.scheduler.num_waiting or len(bench.flight) < DEPTH:
        bench.step(measure=False)
    for _ in range(16):
        bench.step(measure=False)
    for _ in range(steps):
        bench.step(measure=True)
    bench.scheduler.check_integrity()
    return bench.times.summary()


def mixed(running: int, steps: int) -> dict[str, float]:
    """Returns the times of a load in which requests arrive and finish in every step and long prompts are chunked."""
    bench = Bench(running, blocks=running * 48, budget=4096)
    number = 0

    def refill() -> None:
        nonlocal number
        while bench.scheduler.num_running + bench.scheduler.num_waiting < running:
            number += 1
            bench.submit(6000 if number % 64 == 0 else 32 + number * 29 % 300, 20 + number * 13 % 200)

    for _ in range(steps // 2 + 100):
        refill()
        bench.step(measure=False)
    for _ in range(steps):
        refill()
        bench.step(measure=True)
    bench.scheduler.check_integrity()
    counters = bench.scheduler.counters
    return {
        **bench.times.summary(),
        "running": bench.scheduler.num_running,
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
    }


def long_prompt(limit: int, *, base_ms: float = 8.0, token_ms: float = 0.6) -> dict[str, float]:
    """Returns what a prompt of 20,000 tokens does to 16 running streams, in a model of a worker's time.

    A step takes ``base_ms`` and ``token_ms`` for every token: about what a small model takes on two CPU cores. Time is
    counted, not spent.
    """
    scheduler = Scheduler(
        Limits(
            max_slots=32,
            num_blocks=4096,
            max_model_len=32_768,
            max_batched_tokens=512,
            vocab_size=VOCAB,
            long_prefill_limit=limit,
            max_partial_prefills=1,
        )
    )
    draw = np.random.default_rng(0)

    def submit(handle: int, prompt: int, output: int) -> None:
        scheduler.submit(
            Request(
                front_end=FrontEnd(0),
                handle=handle,
                attempt=0,
                request_id=str(handle),
                prompt_len=prompt,
                tokens=draw.integers(3, VOCAB, prompt, dtype=np.int32),
                params=SamplingParams(max_tokens=output),
                root=root_key("bench"),
            )
        )

    for handle in range(16):
        submit(handle, 32, 4000)
    now, last, gaps, first, flight = 0.0, dict.fromkeys(range(16), 0.0), [], 0.0, deque[StepPlan]()
    quiet: list[float] = []
    submitted = 0.0
    step = 0
    while not first:
        step += 1
        if step == 200:
            submit(99, 20_000, 4)
            submitted = now
        while len(flight) < DEPTH and (plan := scheduler.plan()) is not None:
            flight.append(plan)
        plan = flight.popleft()
        now += base_ms + token_ms * float(plan.num_tokens.sum())
        offsets = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.samples, out=offsets[1:])
        result = StepResult(plan.step_id, offsets, draw.integers(3, VOCAB, int(offsets[-1]), dtype=np.int32))
        for output in scheduler.apply(result):
            for handle in output.handles.tolist():
                if handle == 99:
                    first = now
                    continue
                if step > 100:
                    (gaps if submitted else quiet).append(now - last[handle])
                last[handle] = now
    return {
        "long_prefill_limit": limit,
        "itl_alone_ms": round(statistics.median(quiet), 2),
        "itl_beside_ms": round(statistics.median(gaps), 2),
        "itl_worst_ms": round(max(gaps), 2),
        "factor_worst": round(max(gaps) / statistics.median(quiet), 2),
        "long_prompt_ttft_s": round((first - submitted) / 1e3, 2),
    }


# -------------------------------------------------------------------------------------------- through a whole core


async def through(requests: int, *, prompt: int, output: int, concurrency: int) -> dict[str, float]:
    """Sends short requests through a core process whose worker, another process, answers at once."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        listen, link = f"unix:{directory}/core.sock", f"{directory}/worker.sock"
        environment = os.environ | {"PYTHONPATH": str(root)}
        core = subprocess.Popen(
            [sys.executable, "-m", "tercet_core", f"--listen={listen}", f"--link={link}", "--log-level=error"],
            env=environment,
        )
        worker = subprocess.Popen(
            [sys.executable, __file__, "--act-as-worker", link, "--slots", str(concurrency)], env=environment
        )
        try:
            return await _load(listen, requests, prompt=prompt, output=output, concurrency=concurrency)
        finally:
            for process in (core, worker):
                process.terminate()
            for process in (core, worker):
                process.wait(20)


async def _load(listen: str, requests: int, *, prompt: int, output: int, concurrency: int) -> dict[str, float]:
    async with grpc.aio.insecure_channel(listen, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Connect(wait_for_ready=True)
        await call.write(pb.ClientFrame(hello=pb.Hello(frontend_id="bench", protocol=1)))
        while not (await call.read()).HasField("welcome"):
            pass
        sampling = pb.Sampling(temperature=0, top_p=1, max_tokens=output)
        draw = np.random.default_rng(0)
        sent = ended = tokens = 0
        begin = time.perf_counter()
        while ended < requests:
            room = min(concurrency - (sent - ended), requests - sent)
            if room:
                ids = draw.integers(3, VOCAB, (room, prompt), dtype=np.int32)
                submits = [
                    pb.Submit(handle=sent + i, request_id=str(sent + i), prompt_ids=ids[i].tobytes(), sampling=sampling)
                    for i in range(room)
                ]
                await call.write(pb.ClientFrame(submits=submits))
                sent += room
            step = (await call.read()).step
            tokens += len(step.token_ids) // 4
            ended += len(step.finish_reasons)
        seconds = time.perf_counter() - begin
        call.cancel()
    if tokens != requests * output:
        raise SystemExit(f"{tokens} tokens arrived, {requests * output} were due")
    return {
        "requests": requests,
        "seconds": round(seconds, 2),
        "requests_per_s": round(requests / seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
    }


async def act_as_worker(link: str, slots: int) -> None:
    """Answers every step at once until the core is gone."""
    # The parent starts core and worker at once, and there is no event for a path.
    while not Path(link).exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    worker = FakeWorker(Path(link), max_slots=slots, num_blocks=slots * 8, max_batched_tokens=16_384)
    worker.keep_plans = False
    async with worker:
        await worker.connection.wait_closed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[256, 4096, 1024])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--through", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=1024)
    parser.add_argument("--act-as-worker", metavar="LINK", help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=256, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.act_as_worker:
        asyncio.run(act_as_worker(arguments.act_as_worker, arguments.slots))
        return
    if arguments.through:
        load: dict[str, Any] = {name: getattr(arguments, name) for name in ("prompt", "output", "concurrency")}
        print(json.dumps(asyncio.run(through(arguments.through, **load))), flush=True)
        return
    for limit in (0, 128, 32):
        print(json.dumps({"load": "a prompt of 20,000 tokens beside 16 streams", **long_prompt(limit)}), flush=True)
    calibration = calibration_ms()
    line: dict[str, float] = mixed(1024, arguments.steps)
    print(json.dumps({"load": "mixed", **line, "calibrations": round(line["total_ms"] / calibration, 3)}), flush=True)
    for running in arguments.running:
        calibration = calibration_ms()
        line = steady(running, arguments.steps)
        calibration = (calibration + calibration_ms()) / 2
        print(
            json.dumps({"running": running, **line, "calibrations": round(line["total_ms"] / calibration, 3)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
