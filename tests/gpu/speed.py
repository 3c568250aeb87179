"""How fast the worker is for a model of the shape of Llama 3 8B with random weights, against what the GPU can do.

Legend: T tokens.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from tercet_shared.checkpoint import ModelConfig, RopeConfig
from tercet_shared.config import WorkerSettings, parse
from tercet_shared.sampling_params import SamplingParams
from tercet_worker.attention.interface import AttentionSpec
from tercet_worker.models import create_model
from tercet_worker.parallel.communicator import ALONE
from tercet_worker.parallel.topology import SINGLE
from tercet_worker.platforms.cuda import CudaPlatform, Machine
from tercet_worker.platforms.interface import ExecutorShape
from tercet_worker.runner import ModelRunner
from tercet_worker.sampling import Sampler
from tercet_worker.state.checks import PlanLimits
from tercet_worker.state.slots import SlotState
from tests.integration.worker.driver import Driver

SHAPE = ModelConfig(
    architecture="LlamaForCausalLM",
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0, rotary_dim=128, scaling=None),
    hidden_act="silu",
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_ids=(),
    raw={},
)
SLOTS, STEP, LENGTH, BLOCK = 256, 8192, 4096, 16
CONTEXT = 512
"""Tokens that each request of a decode step has, about."""
DEPTH = 2
FP8_S = 90.0
"""Kept for the model with weights of eight bits: it is drawn, compiled and captured anew."""
GREEDY = SamplingParams(temperature=0.0)

Row = tuple[str, str]


class Bench:
    """A loaded worker of that shape.

    Args:
        machine: the GPU.
        slots: requests at once.
        step: tokens of a step.
        flags: more of the worker's.
    """

    def __init__(self, machine: Machine, slots: int, step: int, *flags: str) -> None:
        self.machine = machine
        self._step = step
        settings = parse(
            WorkerSettings, ["none", f"--max-num-seqs={slots}", f"--max-num-batched-tokens={step}", *flags]
        )
        platform = CudaPlatform(settings, machine)
        spec = AttentionSpec(32, 8, 128, BLOCK, platform.dtype, 128**-0.5)
        attention = platform.attention(spec)
        weights = create_model(SHAPE, platform.placement(), SINGLE.share(SHAPE))
        torch.manual_seed(0)
        self.weight_bytes = 0
        for destination in weights.destinations().values():
            self.weight_bytes += destination.nbytes
            rows = max(1, 2**24 // (destination.extents[-1] if len(destination.extents) > 1 else 1))
            for start in range(0, destination.extents[0], rows):
                size = (min(rows, destination.extents[0] - start), *destination.extents[1:])
                destination.store(start, torch.randn(size, device=machine.device) * 0.02)
        model = platform.executor(weights, attention, ExecutorShape(step, slots, SHAPE.vocab_size), ALONE)
        began = time.monotonic()
        memory = platform.memory_for_kv(model)  # compiles
        compiling = time.monotonic() - began
        blocks = min(memory.available // attention.bytes_per_block(32), slots * (LENGTH // BLOCK))
        attention.allocate_kv(32, blocks)
        state = SlotState(
            slots=slots, max_model_len=LENGTH, block_size=BLOCK, device=machine.device, hand_over=platform.hand_over()
        )
        limits = PlanLimits(SHAPE.vocab_size, blocks, BLOCK, step)
        began = time.monotonic()
        parts = platform.step_parts(model, attention, state, limits, lambda _stage, _fraction: None)
        self.start_s = time.monotonic() - began + compiling
        sampler = Sampler(SHAPE.vocab_size, machine.device, parts=platform.sampler_parts())
        self.runner = ModelRunner(model, attention, state, sampler, limits, build=parts.build, transfer=parts.transfer)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step of one token reads: of the embedding it is a row."""
        return self.weight_bytes - SHAPE.vocab_size * SHAPE.hidden_size * 2

    def filled(self, rows: int, context: int) -> Driver:
        """Returns a driver whose ``rows`` requests have computed their prompts."""
        self.runner.reset()
        driver = Driver(self.runner)
        for slot in range(rows):
            driver.start(slot, [(7 * slot + place) % 1000 for place in range(context)], GREEDY)
        while needs := {slot: request.need for slot, request in driver.requests.items() if not request.output}:
            counts, left = {}, self._step
            for slot, need in needs.items():
                if count := min(need, left):
                    counts[slot] = count
                    left -= count
            driver.step(counts)
        return driver

    def decode(self, driver: Driver, steps: int) -> float:
        """Returns seconds per step of decodes, two under way at once."""
        counts = dict.fromkeys(driver.requests, 1)
        flight = deque(driver.submit(counts) for _ in range(DEPTH))
        began = 0.0
        for step in range(steps + 8):
            if step == 8:
                torch.cuda.synchronize()
                began = time.monotonic()
            plan, pending = flight.popleft()
            driver.land(plan, pending.result())
            flight.append(driver.submit(counts))
        torch.cuda.synchronize()
        took = time.monotonic() - began
        while flight:
            plan, pending = flight.popleft()
            driver.land(plan, pending.result())
        return took / steps


def measure(machine: Machine, deadline: float) -> Iterator[Row]:
    """Yields rows of the table, until the clock says ``deadline``."""
    copy, matrix = _copy_rate(machine.device), _matrix_rate(machine.device)
    yield "copy bandwidth (read and write)", f"{copy / 1e12:.2f} TB/s"
    yield "matrix rate, bfloat16", f"{matrix / 1e12:.0f} TFLOP/s"
    bench = Bench(machine, SLOTS, STEP)
    yield "compiling and capturing", f"{bench.start_s:.1f} s"
    yield "decode, batch 1", _alone(bench, copy)
    if time.time() > deadline:
        return
    bench.filled(4, 2048)  # what libraries choose at first use is not measured
    torch.cuda.synchronize()
    began = time.monotonic()
    driver = bench.filled(16, 2048)
    torch.cuda.synchronize()
    took, tokens = time.monotonic() - began, 16 * 2048
    flops = 2 * (bench.read_bytes / 2) * tokens + 4 * 32 * 4096 * tokens * 2048 / 2
    share = flops / took / matrix
    yield "prefill, 8,192 tokens per step", f"{tokens / took:.0f} tokens/s, {share:.0%} of the matrix rate"
    del driver
    if time.time() > deadline:
        return
    driver = bench.filled(SLOTS, CONTEXT)
    per_step = bench.decode(driver, 60)
    yield f"decode, batch {SLOTS}", f"{per_step * 1e3:.2f} ms, {SLOTS / per_step:.0f} tokens/s"
    if time.time() > deadline:
        return
    yield from _gaps(bench)
    # Another model, so last, and small: one request, few graphs.
    if machine.capability < (8, 9) or time.time() > deadline - FP8_S:
        return
    del bench, driver
    gc.collect()
    torch.cuda.empty_cache()
    yield "decode, batch 1, weights of eight bits", _alone(Bench(machine, 1, 64, "--quantization=fp8"), copy)


def _alone(bench: Bench, copy: float) -> str:
    """Returns how long a decode of one request takes, and what that is of the rate ``copy``, in bytes/s."""
    per_step = bench.decode(bench.filled(1, CONTEXT), 100)
    return f"{per_step * 1e3:.2f} ms, {bench.read_bytes / per_step / copy:.0%} of the copy bandwidth"


def _gaps(bench: Bench) -> Iterator[Row]:
    """Reads from a trace how long the GPU had nothing to do, and for what the host waited."""
    driver = bench.filled(64, CONTEXT)
    bench.decode(driver, 8)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        bench.decode(driver, 24)
    busy, waits = [], 0.0
    for event in trace.events() or ():
        if event.is_user_annotation:
            continue  # it lasts as long as what it is about, gaps included
        if event.device_type == torch.autograd.DeviceType.CUDA:
            busy.append((event.time_range.start, event.time_range.end))
        elif event.name in {"cudaStreamSynchronize", "cudaDeviceSynchronize"}:
            waits += 1
    if not busy:
        yield "GPU without work, decode of 64", "not known: the profiler saw no kernels"
        return
    busy.sort()
    idle, end = 0.0, busy[0][0]
    for begin, until in busy:
        idle += max(0.0, begin - end)
        end = max(end, until)
    span = end - busy[0][0]
    yield "GPU without work, decode of 64", f"{idle / span:.1%} of the time, {idle / (24 + 8 + DEPTH):.0f} us per step"
    # What `decode` itself asks for at its two ends is not the worker's.
    yield "waits of the host for all of the GPU", f"{max(0, int(waits) - 2)} in {24 + 8} steps"


def _copy_rate(device: torch.device) -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _matrix_rate(device: torch.device) -> float:
    left, right = (torch.randn((8192, 8192), device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _seconds(lambda: left @ right)


def _seconds(work: object) -> float:
    assert callable(work)
    for _ in range(3):
        work()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(20):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 20e3
