"""Decode steps in one call against the usual way: the same tokens and tables, and nothing done where it must not be."""

from __future__ import annotations

import ctypes
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tercet_shared.errors import ProtocolError
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import StepPlan
from tercet_worker.kernels.decode_abi import DecodeOutcome
from tercet_worker.runner import ModelRunner
from tercet_worker.startup import Engine
from tests.fakes.checkpoints import write_tiny_llama
from tests.integration.worker.driver import Driver, engine_for

V = 384
SCHED_GETATTR = 315 if platform.machine() == "x86_64" else 275
PROMPTS = [np.random.default_rng(length).integers(3, V, length).tolist() for length in (15, 1, 16, 33, 2, 47)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(model: Path, request: pytest.FixtureRequest) -> Engine:
    return engine_for(model, f"--dtype={request.param}", "--num-kv-blocks=64", "--max-num-seqs=8", "--threads=2")


@pytest.fixture(scope="module")
def usual(model: Path, engine: Engine) -> ModelRunner:
    """The same model without the short cut."""
    dtype = engine.offer.dtype
    runner = engine_for(model, f"--dtype={dtype}", "--num-kv-blocks=64", "--max-num-seqs=8", "--threads=2").runner
    runner._decode = None
    return runner


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=100),
    SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=100),
    SamplingParams(temperature=0.0, max_tokens=100, min_tokens=6, eos_token_ids=tuple(range(0, V, 7))),
    SamplingParams(temperature=1.3, seed=3, max_tokens=100),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, max_tokens=100),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.8, seed=5, max_tokens=100),
]
"""What each request asks for: greedy and drawn, one with stop ids that are masked at first."""


def outputs(runner: ModelRunner, chosen: list[int], steps: int) -> list[list[int]]:
    """Runs the chosen prompts together and returns their outputs."""
    runner.reset()
    driver = Driver(runner)
    requests = [driver.start(slot, PROMPTS[index], PARAMS[index]) for slot, index in enumerate(chosen)]
    for request in requests:
        driver.step({request.slot: request.need})
    for _ in range(steps):
        driver.step({request.slot: 1 for request in requests})
    return [request.output for request in requests]


@pytest.mark.parametrize(
    "chosen", [*([each] for each in range(6)), [0, 3], [0, 4, 1, 3, 5], [5, 1], [0, 1, 2, 3, 4, 5]], ids=str
)
def test_tokens_are_those_of_the_usual_way(engine: Engine, usual: ModelRunner, chosen: list[int]) -> None:
    assert outputs(engine.runner, chosen, 36) == outputs(usual, chosen, 36)
    mine, theirs = engine.runner._state, usual._state
    for name in ("occupied", "known", "computed", "blocks"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def joined(runner: ModelRunner) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Lets others begin with the last token of a prompt that is cached whole, beside the first, which then ends.

    Returns all outputs, and the cached block before and after.
    """
    runner.reset()
    driver = Driver(runner)
    storage = runner._attention._storage  # type: ignore[attr-defined]
    requests = [driver.start(0, PROMPTS[2], PARAMS[0])]
    driver.step({0: 16})
    shared = requests[0].blocks[:1]
    before = storage.block(shared[0]).clone()
    for slot, params in ((1, PARAMS[1]), (2, PARAMS[0])):
        requests.append(driver.start(slot, PROMPTS[2], params, shared=shared))
        driver.step(dict.fromkeys(range(slot + 1), 1))
    driver.finish(requests[0], keep=1)
    requests.append(driver.start(0, PROMPTS[1], PARAMS[3]))
    driver.step({2: 1, 0: 1, 1: 1})
    driver.finish(requests[1], keep=1)
    driver.step({0: 1, 2: 1})
    return [request.output for request in requests], before, storage.block(shared[0]).clone()


def test_rows_that_begin_and_end_do_not_keep_a_step_from_it(
    engine: Engine, usual: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[DecodeOutcome] = []
    decode = engine.runner._decode
    assert decode is not None
    run = decode.run
    monkeypatch.setattr(decode, "run", lambda plan: outcomes.append(run(plan)) or outcomes[-1])
    mine, before, after = joined(engine.runner)
    assert outcomes == [DecodeOutcome.DRAWN] * 4
    assert torch.equal(before, after), "nobody writes to a block that is shared"
    assert mine == joined(usual)[0]
    for name in ("occupied", "known", "computed", "blocks"):
        here, there = getattr(engine.runner._state, name), getattr(usual._state, name)
        np.testing.assert_array_equal(here, there, err_msg=name)


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"prompt_logprobs": 0}])
def test_rows_that_begin_and_ask_for_more_are_left_to_the_usual_way(engine: Engine, asked: dict[str, int]) -> None:
    engine.runner.reset()
    driver = Driver(engine.runner)
    driver.start(0, PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=100, **asked))
    result = driver.step({0: 1})
    assert len(result.token_ids) == 1
    assert (result.logprobs is None) == ("logprobs" not in asked)


def decoding(engine: Engine) -> tuple[Driver, StepPlan]:
    """Returns a driver with two decoding requests, and the plan of a step of theirs that was not executed."""
    engine.runner.reset()
    driver = Driver(engine.runner)
    for slot, prompt in enumerate((PROMPTS[1], PROMPTS[3])):
        driver.start(slot, prompt, SamplingParams(temperature=0.0, max_tokens=100))
        driver.step({slot: len(prompt)})
    plan, pending = driver.submit({0: 1, 1: 1})
    driver.land(plan, pending.result())
    return driver, plan


def following(plan: StepPlan) -> StepPlan:
    """Returns the plan of the next step, which needs no block."""
    return StepPlan(
        step_id=plan.step_id + 1,
        freed=plan.freed,
        new=plan.new,
        slots=plan.slots.copy(),
        num_tokens=plan.num_tokens.copy(),
        computed=plan.computed + np.int32(1),
        samples=plan.samples.copy(),
        block_offsets=np.zeros(3, np.int32),
        block_ids=np.zeros(0, np.int32),
    )


def test_a_sound_step_is_taken(engine: Engine) -> None:
    _, plan = decoding(engine)
    assert engine.runner._decode is not None
    assert engine.runner._decode.run(following(plan)) is DecodeOutcome.DRAWN


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("slots", [0, 0]),
        ("slots", [0, 7]),
        ("slots", [0, 99]),
        ("slots", [-1, 1]),
        ("num_tokens", [1, 2]),
        ("num_tokens", [0, 1]),
        ("computed", [3, 3]),
        ("computed", [-1, 1]),
        ("samples", [True, False]),
    ],
)
def test_an_unsound_step_is_left_alone_and_refused(engine: Engine, column: str, value: list[int]) -> None:
    _, plan = decoding(engine)
    bad = following(plan)
    setattr(bad, column, np.array(value, getattr(bad, column).dtype))
    state = engine.runner._state
    before = [state.known.copy(), state.computed.copy(), state.blocks.copy(), state.tokens.clone()]
    assert engine.runner._decode is not None
    assert engine.runner._decode.run(bad) is DecodeOutcome.NOT_PLAIN
    with pytest.raises(ProtocolError):
        engine.runner.execute(bad)
    after = [state.known, state.computed, state.blocks, state.tokens]
    assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))


def turn_of(thread: int) -> int:
    """Returns how long a thread keeps a processor that others want, in ns; 0 where the kernel does not say."""
    attributes = (ctypes.c_uint32 * 12)()
    found = ctypes.CDLL(None).syscall(SCHED_GETATTR, thread, attributes, 48, 0)
    return attributes[6] | attributes[7] << 32 if found == 0 else 0


def name_of(task: Path) -> str:
    """Returns a thread's name; nothing where it has ended meanwhile, as one may that was joined a moment ago."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (task / "comm").read_text()
    return ""


@pytest.mark.skipif(turn_of(0) == 0, reason="this kernel does not tell the length of a thread's turns")
def test_threads_that_compute_take_long_turns_and_pass_them_on_to_nobody(engine: Engine) -> None:
    def compute() -> tuple[int, int]:
        engine.runner.reset()
        driver = Driver(engine.runner)
        driver.start(0, PROMPTS[1])
        driver.step({0: 1})
        with ThreadPoolExecutor(1) as another:
            return turn_of(0), another.submit(turn_of, 0).result()

    with ThreadPoolExecutor(1) as device:
        own, passed_on = device.submit(compute).result()
    assert own == 5_000_000
    assert 0 < passed_on < own
    helpers = [int(task.name) for task in Path("/proc/self/task").iterdir() if name_of(task) == "tercet-kernels\n"]
    assert helpers
    assert {turn_of(thread) for thread in helpers} == {5_000_000}


@pytest.mark.parametrize("block", [-1, 64])
def test_a_block_out_of_range_is_refused(engine: Engine, block: int) -> None:
    _, plan = decoding(engine)
    bad = following(plan)
    bad.block_offsets, bad.block_ids = np.array([0, 1, 1], np.int32), np.array([block], np.int32)
    with pytest.raises(ProtocolError, match="block id"):
        engine.runner.execute(bad)


def test_rows_that_are_not_finite_yield_nothing(engine: Engine) -> None:
    driver, _ = decoding(engine)
    state = engine.runner._state
    storage = engine.runner._attention._storage  # type: ignore[attr-defined]
    # All scores of the second request, and nobody else's, are not numbers.
    storage.block(int(state.block_tables[1, 0])).fill_(0xFF)
    _, pending = driver.submit({0: 1, 1: 1})
    result = pending.result()
    assert result.not_finite.tolist() == [1]
    assert np.diff(result.token_offsets).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [((), 256), (("--max-num-seqs=300",), 300), (("--max-num-seqs=900",), 512), (("--max-num-batched-tokens=70",), 70)],
)
def test_by_default_a_step_has_room_for_all_that_decode(model: Path, flags: tuple[str, ...], tokens: int) -> None:
    assert engine_for(model, "--num-kv-blocks=64", "--threads=1", *flags).offer.max_batched_tokens == tokens
