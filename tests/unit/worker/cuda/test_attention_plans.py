"""How attention on a GPU plans a step: what rows of padding read, and which rows are planned together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels are run with Triton's interpreter")

from tercet_worker.attention.flashinfer import FlashInferAttention
from tercet_worker.attention.interface import AttentionBatch, AttentionSpec, HostAttention
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.cuda.layout import alike
from tercet_worker.graphs.dispatch import Choice, Mode
from tests.fakes.gpu import FakeStreams, FakeWrapper, FakeWrappers

CPU = torch.device("cpu")
BLOCK, BLOCKS, HQ, HKV, D = 16, 64, 4, 2, 16
NOWHERE = 2**30
"""What a table holds that was never written to, at worst."""


def attention_for(
    wrappers: FakeWrappers, *, windows: tuple[int, ...] = (), invariant: bool = False
) -> FlashInferAttention:
    spec = AttentionSpec(HQ, HKV, D, BLOCK, torch.float32, D**-0.5, sliding_windows=windows)
    made = FlashInferAttention(spec, wrappers, FakeStreams(), CPU, max_rows=16, batch_invariant=invariant)
    made.allocate_kv(max(len(windows), 1), BLOCKS)
    made.reserve(16 * 8)
    assert made._cache is not None
    made._cache.copy_(torch.randn(made._cache.shape, generator=torch.Generator().manual_seed(1)))
    return made


def batch_of(counts: list[int], lens: list[int], choice: Choice, slots: list[int] | None = None) -> AttentionBatch:
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    held = list(range(len(counts))) if slots is None else slots
    table = torch.full((16, 8), NOWHERE, dtype=torch.int32)
    for number, slot in enumerate(held):
        table[slot, : -(-lens[number] // BLOCK)] = (torch.arange(-(-lens[number] // BLOCK)) * 7 + number).int() % BLOCKS
    lengths = np.array(lens, np.int32)
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lengths),
        slots=torch.tensor(held, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((choice.tokens,), -1),
        max_query_len=max(counts),
        num_tokens=choice.tokens,
        host=HostAttention(starts, lengths, 0, choice),
    )


def attend(attention: FlashInferAttention, batch: AttentionBatch) -> torch.Tensor:
    queries = torch.randn((batch.num_tokens, HQ, D), generator=torch.Generator().manual_seed(2))
    out = torch.full_like(queries, torch.nan)
    attention.plan(batch)
    attention.attend(0, queries, out)
    return out


def test_rows_of_padding_read_a_page_of_a_row_that_has_one() -> None:
    # Slot 0 never had a request: what its table holds is nowhere in the cache.
    attention = attention_for(FakeWrappers())
    out = attend(attention, batch_of([1, 1, 1], [40, 3, 17], Choice(Mode.FULL, 8), slots=[5, 2, 9]))
    assert int(attention._pages[: 3 + 1 + 2 + 5].max()) < BLOCKS
    assert out.isfinite().all()


def test_windows_that_are_used_in_one_step_have_schedules_of_their_own() -> None:
    wrappers = FakeWrappers()
    attention = attention_for(wrappers, windows=(8, 0, 8))
    attention.plan(batch_of([1, 1], [40, 3], Choice(Mode.FULL, 2)))
    assert wrappers.schedules == 2
    graphs = [each.graphs[2] for each in attention._sets.values()]
    assert all(isinstance(graph, FakeWrapper) for graph in graphs)
    assert graphs[0].schedule is not graphs[1].schedule  # type: ignore[attr-defined]  # of a FakeWrapper


@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=12), group=st.sampled_from([1, 3, 4, 8, 32]))
def test_rows_that_are_planned_together_take_the_tile_that_each_takes_alone(counts: list[int], group: int) -> None:
    def tile(mean: int) -> int:  # as FlashInfer chooses
        return 128 if mean > 64 else 64 if mean > 16 else 16

    groups = alike(np.array(counts, np.int32), group)
    assert sorted(row for _, rows in groups for row in rows.tolist()) == list(range(len(counts)))
    for kind, rows in groups:
        pairs = [counts[row] * group for row in rows]
        assert {tile(each) for each in pairs} == {tile(sum(pairs) // len(pairs))}
        assert all((counts[row] == 1) == (kind == 1) for row in rows)


def test_where_results_must_not_depend_on_the_batch_rows_are_planned_by_their_own_length() -> None:
    wrappers = FakeWrappers()
    attention = attention_for(wrappers, invariant=True)
    counts, lens = [1, 1, 2, 40, 20, 3, 90], [40, 17, 2, 100, 20, 70, 90]
    batch = batch_of(counts, lens, Choice(Mode.EAGER, sum(counts)))
    out = attend(attention, batch)
    assert wrappers.log == ["decode", "prefill", "prefill", "prefill"]
    (each,) = attention._sets.values()
    for purpose, wrapper in each.others.items():
        assert isinstance(wrapper, FakeWrapper)
        # Partial results of long rows would take memory for each of their queries.
        assert wrapper.options.get("disable_split_kv", False) is (purpose != "decode")
        assert wrapper.options.get("fixed_split_size") == (256 if purpose == "decode" else None)
    reference = TorchAttention(attention.spec)
    reference.allocate_kv(1, BLOCKS)
    assert attention._cache is not None
    assert reference._cache is not None
    reference._cache[0].copy_(attention._cache[0].transpose(0, 1).reshape(2, BLOCKS * BLOCK, HKV, D))
    reference.plan(batch)
    queries, expected = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)), torch.zeros_like(out)
    nothing = torch.zeros((len(out), HKV, D))
    reference.forward(0, queries, nothing, nothing, expected)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("windows", [(), (8, 0)])
def test_all_kernels_are_tried_before_a_request_comes(windows: tuple[int, ...]) -> None:
    wrappers = FakeWrappers()
    attention = attention_for(wrappers, windows=windows)
    attention.warm_up()
    assert set(wrappers.log) == {"decode", "prefill"} | (set() if windows else {"cascade"})
