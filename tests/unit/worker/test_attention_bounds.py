"""Steps that refer to what does not exist are refused by name, before anything is read or written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tercet_shared.errors import ConfigurationError
from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.interface import AttentionBatch, AttentionPlanError
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.kernels.library import Isa, KernelLibrary
from tests.unit.worker.attention_cases import World, make_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tercet_worker.attention.interface import AttentionBackend


@pytest.fixture(params=["kernels", "torch"])
def backend(request: pytest.FixtureRequest, library: KernelLibrary) -> AttentionBackend:
    spec = make_spec(torch.float32)
    return TorchAttention(spec) if request.param == "torch" else CpuAttention(spec, library, threads=2)


@pytest.fixture
def world() -> World:
    return World(make_spec(torch.float32), [40, 21])


PARTS = [(0, 0, 40), (1, 0, 21)]


def changed(tensor: Tensor, index: int | tuple[int, int], value: int) -> Tensor:
    copy = tensor.clone()
    copy[index] = value
    return copy


def in_table(world: World, column: int, value: int) -> Callable[[AttentionBatch], AttentionBatch]:
    return lambda b: replace(b, block_table=changed(b.block_table, (world.sequences[1].slot, column), value))


@pytest.mark.parametrize(
    ("field", "index", "value", "row"),
    [
        ("query_start_loc", 0, 1, 0),
        ("query_start_loc", 1, 0, 0),
        ("query_start_loc", 1, 61, 0),
        ("query_start_loc", 2, 62, 1),
        ("query_start_loc", 2, 2**31 - 1, 1),
        ("seq_lens", 1, 20, 1),
        ("seq_lens", 1, 0, 1),
        ("seq_lens", 1, -5, 1),
        ("seq_lens", 1, 65, 1),
        ("seq_lens", 0, 2**31 - 1, 0),
        ("slots", 0, -1, 0),
        ("slots", 1, 4, 1),
        ("slots", 1, 2**30, 1),
        ("slot_mapping", 7, -2, 7),
        ("slot_mapping", 60, 2**40, 60),
        ("slot_mapping", 3, 128, 3),
    ],
)
def test_values_out_of_range_are_refused_with_their_row(
    backend: AttentionBackend, world: World, field: str, index: int, value: int, row: int
) -> None:
    world.attach(backend)
    batch = world.batch(PARTS)
    assert world.num_blocks == 8
    with pytest.raises(AttentionPlanError, match=str(value)) as caught:
        backend.plan(replace(batch, **{field: changed(getattr(batch, field), index, value)}))
    assert caught.value.row == row
    refuses_to_compute(backend, world)


@pytest.mark.parametrize("value", [-1, 8, 2**30, -(2**31)])
@pytest.mark.parametrize("column", [0, 1])
def test_block_ids_out_of_range_are_refused(backend: AttentionBackend, world: World, column: int, value: int) -> None:
    world.attach(backend)
    with pytest.raises(AttentionPlanError, match=f"request 1 refers to block {value}, but the cache has 8") as caught:
        backend.plan(in_table(world, column, value)(world.batch(PARTS)))
    assert caught.value.row == 1
    refuses_to_compute(backend, world)


def refuses_to_compute(backend: AttentionBackend, world: World) -> None:
    s = world.sequences[0]
    with pytest.raises(AttentionPlanError, match="no plan"):
        backend.forward(0, s.q[0], s.k[0], s.v[0], torch.empty_like(s.q[0]))


def test_the_table_may_change_after_the_plan(backend: AttentionBackend, world: World) -> None:
    """The persistent table gets the next step's blocks while this step runs."""
    world.attach(backend)
    expected = world.step(backend, PARTS)[0]
    batch = world.batch(PARTS)
    backend.plan(batch)
    batch.block_table.fill_(2**30)
    batch.slot_mapping.fill_(2**40)
    q, k, v = (torch.cat([getattr(s, name)[0] for s in world.sequences]) for name in ("q", "k", "v"))
    out = torch.empty_like(q)
    backend.forward(0, q, k, v, out)
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("seq_lens", lambda t: t.long()),
        ("block_table", lambda t: t[:, ::2]),
        ("block_table", lambda t: t.flatten()),
        ("slots", lambda t: t[:1]),
        ("slot_mapping", lambda t: t.int()),
        ("slot_mapping", lambda t: t[:-1]),
        ("query_start_loc", lambda t: t[:-1]),
    ],
)
def test_tensors_of_another_layout_are_refused(
    backend: AttentionBackend, world: World, field: str, make: Callable[[Tensor], Tensor]
) -> None:
    world.attach(backend)
    batch = world.batch(PARTS)
    with pytest.raises(AttentionPlanError, match=field):
        backend.plan(replace(batch, **{field: make(getattr(batch, field))}))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t[:-1],
        lambda t: t.bfloat16(),
        lambda t: t[..., :32],
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    ],
    ids=["short", "dtype", "narrow", "strides"],
)
def test_layer_tensors_that_do_not_fit_are_refused(
    backend: AttentionBackend, world: World, name: str, make: Callable[[Tensor], Tensor]
) -> None:
    world.attach(backend)
    backend.plan(world.batch([(0, 0, 40)]))
    s = world.sequences[0]
    tensors = {"q": s.q[0], "k": s.k[0], "v": s.v[0], "out": torch.empty_like(s.q[0])}
    tensors[name] = make(tensors[name])
    with pytest.raises(AttentionPlanError, match=f"^{name} "):
        backend.forward(0, **tensors)


@pytest.mark.parametrize("layer", [-1, 2, 2**31 - 1])
def test_layers_that_do_not_exist_are_refused(backend: AttentionBackend, world: World, layer: int) -> None:
    world.attach(backend)
    backend.plan(world.batch([(0, 0, 40)]))
    s = world.sequences[0]
    with pytest.raises(AttentionPlanError, match=f"layer {layer}"):
        backend.forward(layer, s.q[0], s.k[0], s.v[0], torch.empty_like(s.q[0]))


def test_padding_is_not_written(backend: AttentionBackend, world: World) -> None:
    storage = backend.allocate_kv(world.layers, world.num_blocks)
    storage.memory.fill_(0x55)
    batch = world.batch([(0, 0, 40)])
    backend.plan(replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1)))
    s = world.sequences[0]
    backend.forward(0, s.q[0], s.k[0], s.v[0], torch.empty_like(s.q[0]))
    assert (storage.memory == 0x55).all()


def test_only_the_tokens_places_are_written(backend: AttentionBackend, world: World) -> None:
    """Of one layer: one key and one value per token and head, whatever the layout."""
    storage = backend.allocate_kv(world.layers, world.num_blocks)
    values = storage.memory.view(torch.float32)
    values.fill_(7.0)
    world.step(backend, [(1, 0, 21)])
    written = (values != 7.0).view(world.layers, -1).sum(1)
    assert written.tolist() == [21 * 2 * 2 * 64] * 2


def test_a_new_cache_replaces_the_old_one(backend: AttentionBackend, world: World) -> None:
    world.attach(backend)
    backend.plan(world.batch(PARTS))
    world.attach(backend)
    refuses_to_compute(backend, world)
    world.step(backend, PARTS)


def test_nothing_is_planned_without_a_cache(backend: AttentionBackend, world: World) -> None:
    with pytest.raises(AttentionPlanError, match="allocate_kv"):
        backend.plan(world.batch(PARTS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_size": 8}, "block size that is a multiple of 16, not 8"),
        ({"block_size": 24}, "block size"),
        ({"block_size": 0}, "block size"),
        ({"head_size": 72}, "head size that is a multiple of 16"),
        ({"head_size": 1024}, "head size"),
        ({"q_heads": 65, "kv_heads": 1}, "64 query heads"),
        ({"q_heads": 6, "kv_heads": 4}, "cannot be divided"),
        ({"logit_soft_cap": -1.0}, "negative"),
    ],
)
def test_models_that_the_kernels_are_not_made_for(
    library: KernelLibrary, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        CpuAttention(make_spec(torch.float32, **changes), library, threads=1)


def test_dtypes_that_attention_is_not_built_for() -> None:
    with pytest.raises(ConfigurationError, match="float16"):
        make_spec(torch.float16)


def test_a_cache_beyond_memory_is_refused(backend: AttentionBackend) -> None:
    with pytest.raises(ConfigurationError, match="makes no sense"):
        backend.allocate_kv(0, 4)
    if isinstance(backend, CpuAttention):
        with pytest.raises(ConfigurationError, match="cannot be allocated"):
            backend.allocate_kv(2**20, 2**30)


def test_windows_are_given_for_every_layer(library: KernelLibrary) -> None:
    spec = make_spec(torch.float32, sliding_windows=(4,))
    for backend in (TorchAttention(spec), CpuAttention(spec, library, threads=1)):
        with pytest.raises(ConfigurationError, match="1 sliding windows were given for 2 layers"):
            backend.allocate_kv(2, 4)


def test_bytes_per_block(backend: AttentionBackend) -> None:
    assert backend.bytes_per_block(30) == 30 * 2 * 2 * 16 * 64 * 4
    assert backend.allocate_kv(30, 5).nbytes == 5 * backend.bytes_per_block(30)


def test_an_instruction_set_that_is_not_there(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelLibrary, "isas", lambda _: (Isa.GENERIC,))
    with pytest.raises(ConfigurationError, match="AVX2 is not available"):
        CpuAttention(make_spec(torch.float32), library, threads=1, isa=Isa.AVX2)
