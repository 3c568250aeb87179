"""The worked example of the counters: block 16, budget 8192, depth 2.

B decodes with 500 prompt and 40 output tokens while A's prompt of 20,000 tokens comes in chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tests.unit.core.support import answer, apply, make_request, next_plan, rows_of

if TYPE_CHECKING:
    from tercet_core.scheduling.request import Request
    from tercet_shared.wire.step import StepPlan


def _counters(scheduler: Scheduler, request: Request) -> tuple[int, int, int]:
    table, slot = scheduler.table, request.slot
    assert slot is not None
    return int(table.known[slot]), int(table.computed[slot]), int(table.placeholders[slot])


def _granted(plan: StepPlan) -> dict[int, tuple[int, bool, int]]:
    """Returns tokens, whether it samples, and new blocks by slot."""
    blocks = np.diff(plan.block_offsets).tolist()
    rows = zip(plan.num_tokens.tolist(), plan.samples.tolist(), blocks, strict=True)
    return dict(zip(plan.slots.tolist(), rows, strict=True))


def test_a_long_prompt_beside_a_decoding_request() -> None:
    scheduler = Scheduler(
        Limits(max_slots=4, num_blocks=2000, block_size=16, max_model_len=32_768, max_batched_tokens=8192)
    )
    b = make_request(1, [7] * 500, max_tokens=100)
    a = make_request(2, [9] * 20_000, max_tokens=10)
    scheduler.submit(b)
    apply(scheduler, answer(next_plan(scheduler)))
    for _ in range(38):
        apply(scheduler, answer(next_plan(scheduler)))
    assert _counters(scheduler, b) == (539, 538, 0)
    next_plan_of_b = next_plan(scheduler)
    scheduler.submit(a)
    # A's first chunk goes with the step that samples B's 41st output token, while the 40th is in flight.
    before = next_plan(scheduler)
    apply(scheduler, answer(next_plan_of_b))
    assert b.slot is not None
    assert a.slot is not None
    assert _counters(scheduler, b) == (540, 540, 1)
    assert _counters(scheduler, a) == (20_000, 8191, 0)
    assert scheduler.table.held[[b.slot, a.slot]].tolist() == [34, 512]

    k = next_plan(scheduler)
    assert _granted(k) == {b.slot: (1, True, 0), a.slot: (8191, False, 512)}
    assert _counters(scheduler, b) == (540, 541, 2)
    assert _counters(scheduler, a) == (20_000, 16_382, 0)
    assert scheduler.table.held[[b.slot, a.slot]].tolist() == [34, 1024]

    (output,) = apply(scheduler, answer(before))
    assert rows_of(output) == [(1, [0])]
    assert _counters(scheduler, b) == (541, 541, 1)
    assert _counters(scheduler, a) == (20_000, 16_382, 0)

    k1 = next_plan(scheduler)
    assert _granted(k1) == {b.slot: (1, True, 0), a.slot: (3618, True, 226)}
    assert _counters(scheduler, b) == (541, 542, 2)
    assert _counters(scheduler, a) == (20_000, 20_000, 1)

    (output,) = apply(scheduler, answer(k))
    assert rows_of(output) == [(1, [0])], "a chunk is no event for the client"
    assert _counters(scheduler, b) == (542, 542, 1)

    k2 = next_plan(scheduler)
    assert {slot: row[:2] for slot, row in _granted(k2).items()} == {b.slot: (1, True), a.slot: (1, True)}
    assert _counters(scheduler, b) == (542, 543, 2)
    assert _counters(scheduler, a) == (20_000, 20_001, 2)

    (output,) = apply(scheduler, answer(k1))
    assert rows_of(output) == [(1, [0]), (2, [0])], "A's first token"
    assert _counters(scheduler, b) == (543, 543, 1)
    assert _counters(scheduler, a) == (20_001, 20_001, 1)
