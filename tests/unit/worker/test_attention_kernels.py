"""Every attention path against float64, and row by row against itself, to the bit."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.kernels.library import Isa, KernelLibrary
from tests.unit.worker.attention_cases import World, assert_close, make_spec, shared_world

if TYPE_CHECKING:
    from torch import Tensor

    from tercet_worker.attention.interface import AttentionBackend, AttentionSpec

DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]
ODD_LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 129, 255, 256, 257)


@pytest.fixture(params=[*(isa.name for isa in Isa), "TORCH"])
def kind(request: pytest.FixtureRequest, library: KernelLibrary) -> str:
    if request.param != "TORCH" and Isa[request.param] not in library.isas():
        pytest.skip(f"this machine has no {request.param}")
    return str(request.param)


def make(kind: str, spec: AttentionSpec, library: KernelLibrary, *, threads: int = 2) -> AttentionBackend:
    if kind == "TORCH":
        return TorchAttention(spec)
    return CpuAttention(spec, library, threads=threads, isa=Isa[kind])


def check(world: World, backend: AttentionBackend, parts: list[tuple[int, int, int]], *, padding: int = 0) -> None:
    results = world.step(backend, parts, padding=padding)
    for layer, outs in enumerate(results):
        for part, out in zip(parts, outs, strict=True):
            assert_close(out, world.expected(layer, part))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "q_heads", "kv_heads"), [(64, 9, 3), (80, 4, 4), (96, 5, 1), (128, 8, 2), (256, 8, 1)]
)
def test_prefill_of_every_length(
    kind: str, library: KernelLibrary, dtype: torch.dtype, head_size: int, q_heads: int, kv_heads: int
) -> None:
    spec = make_spec(dtype, head_size=head_size, q_heads=q_heads, kv_heads=kv_heads)
    world = shared_world(spec, ODD_LENGTHS)
    backend = make(kind, spec, library)
    world.attach(backend)
    check(world, backend, [(i, 0, n) for i, n in enumerate(ODD_LENGTHS)], padding=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(1, 9))
def test_decode_with_every_number_of_heads_per_kv_head(
    kind: str, library: KernelLibrary, dtype: torch.dtype, group: int
) -> None:
    spec = make_spec(dtype, q_heads=2 * group, kv_heads=2)
    world = shared_world(spec, ODD_LENGTHS, seed=group)
    backend = make(kind, spec, library)
    world.attach(backend)
    longer = [(i, 0, n - 1) for i, n in enumerate(ODD_LENGTHS) if n > 1]
    world.step(backend, longer)
    check(world, backend, [(i, n - 1, n) for i, n in enumerate(ODD_LENGTHS)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 256])
def test_decode_batches(kind: str, library: KernelLibrary, dtype: torch.dtype, batch: int) -> None:
    spec = make_spec(dtype, q_heads=3, kv_heads=1)
    lengths = tuple(1 + (7 * i) % 97 for i in range(batch))
    world = shared_world(spec, lengths, layers=1)
    backend = make(kind, spec, library)
    world.attach(backend)
    if first := [(i, 0, n - 1) for i, n in enumerate(lengths) if n > 1]:
        world.step(backend, first)
    check(world, backend, [(i, n - 1, n) for i, n in enumerate(lengths)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_chunks_and_prefills_in_one_step(kind: str, library: KernelLibrary, dtype: torch.dtype) -> None:
    spec = make_spec(dtype)
    world = shared_world(spec, (40, 513, 300, 77))
    backend = make(kind, spec, library)
    world.attach(backend)
    check(world, backend, [(0, 0, 39), (1, 0, 250)])
    check(world, backend, [(0, 39, 40), (1, 250, 273), (2, 0, 256)], padding=1)
    check(world, backend, [(1, 273, 512), (2, 256, 300), (3, 0, 77)])
    check(world, backend, [(1, 512, 513)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 48])
def test_larger_blocks(kind: str, library: KernelLibrary, dtype: torch.dtype, block_size: int) -> None:
    spec = make_spec(dtype, block_size=block_size)
    world = shared_world(spec, (1, 47, 49, 200))
    backend = make(kind, spec, library)
    world.attach(backend)
    check(world, backend, [(0, 0, 1), (1, 0, 47), (2, 0, 33), (3, 0, 100)])
    check(world, backend, [(2, 33, 49), (3, 100, 200)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_sliding_window_and_soft_cap(kind: str, library: KernelLibrary, dtype: torch.dtype, window: int) -> None:
    spec = make_spec(dtype, sliding_windows=(window, 0), logit_soft_cap=3.0)
    world = shared_world(spec, (1, 90, 400))
    backend = make(kind, spec, library)
    world.attach(backend)
    check(world, backend, [(0, 0, 1), (1, 0, 90), (2, 0, 301)])
    check(world, backend, [(2, 301, 400)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_behind_the_window_are_not_read(kind: str, library: KernelLibrary, dtype: torch.dtype) -> None:
    spec = make_spec(dtype, sliding_windows=(37, 37))
    world = World(spec, [300])
    backend = make(kind, spec, library)
    storage = backend.allocate_kv(world.layers, world.num_blocks)
    world.step(backend, [(0, 0, 299)])
    # Keys up to 262 lie behind the window of token 299. Blocks 0 to 15 are given to others, who put anything there.
    world.block_table[world.sequences[0].slot, :16] = world.block_table[world.sequences[0].slot, 15]
    if kind != "TORCH":  # the fallback's layout is another; it gathers whole contexts
        storage.block(int(world.block_table[world.sequences[0].slot, 15])).fill_(0xFF)
        check(world, backend, [(0, 299, 300)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [{}, {"sliding_windows": (70, 0)}], ids=["full", "window"])
def test_a_row_is_the_same_to_the_bit_however_it_is_computed(
    kind: str, library: KernelLibrary, dtype: torch.dtype, more: dict[str, object]
) -> None:
    if kind == "TORCH":
        pytest.skip("only the kernels promise this")
    spec = make_spec(dtype, q_heads=5, kv_heads=1, **more)
    lengths = [530, 300, 64, 1]
    world = World(spec, lengths)
    whole = make(kind, spec, library, threads=1)
    world.attach(whole)
    reference = [[layer[0] for layer in world.step(whole, [(i, 0, n)])] for i, n in enumerate(lengths)]

    together = make(kind, spec, library, threads=3)
    world.attach(together)
    results = world.step(together, [(i, 0, n) for i, n in enumerate(lengths)])
    for i in range(len(lengths)):
        for layer in range(world.layers):
            assert torch.equal(results[layer][i], reference[i][layer])

    chunked = make(kind, spec, library)
    world.attach(chunked)
    edges = [0, 1, 7, 64, 65, 200, 256, 300, 511, 529, 530]
    for begin, end in itertools.pairwise(edges):
        parts = [(i, begin, min(end, n)) for i, n in enumerate(lengths) if begin < n]
        for layer, outs in enumerate(world.step(chunked, parts)):
            for (i, first, last), out in zip(parts, outs, strict=True):
                assert torch.equal(out, reference[i][layer][first:last])

    decoded = make(kind, spec, library)
    world.attach(decoded)
    for position in range(300):
        parts = [(i, position, position + 1) for i, n in enumerate(lengths) if position < n]
        for layer, outs in enumerate(world.step(decoded, parts)):
            for (i, first, last), out in zip(parts, outs, strict=True):
                assert torch.equal(out, reference[i][layer][first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_are_split_over_threads_with_the_same_result(
    kind: str, library: KernelLibrary, dtype: torch.dtype
) -> None:
    if kind == "TORCH":
        pytest.skip("the fallback does not split")
    spec = make_spec(dtype, q_heads=3, kv_heads=1)
    world = shared_world(spec, (1600, 20), layers=1)
    results: list[Tensor] = []
    for threads in (1, 2, 5):
        backend = make(kind, spec, library, threads=threads)
        world.attach(backend)
        world.step(backend, [(0, 0, 1500)])
        chunk = world.step(backend, [(0, 1500, 1599), (1, 0, 19)])
        decode = world.step(backend, [(1, 19, 20), (0, 1599, 1600)])
        assert_close(chunk[0][0], world.expected(0, (0, 1500, 1599)))
        assert_close(decode[0][1], world.expected(0, (0, 1599, 1600)))
        results.append(torch.cat([chunk[0][0], decode[0][0], decode[0][1]]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 48, 512])
@pytest.mark.parametrize(
    "more",
    [{}, {"sliding_windows": (301, 0)}, {"sliding_windows": (4, 0)}],
    ids=["full", "window", "both ends of it in a tile"],
)
def test_where_blocks_lie_changes_nothing(
    kind: str, library: KernelLibrary, dtype: torch.dtype, block_size: int, more: dict[str, object]
) -> None:
    """Blocks that follow each other are read as a stream; others, and few of them, in another way."""
    if kind == "TORCH":
        pytest.skip("only the kernels promise this")
    spec = make_spec(dtype, q_heads=6, kv_heads=2, block_size=block_size, **more)
    lengths = [1091, 777, 257]
    parts = [(0, 1087, 1091), (1, 776, 777), (2, 255, 257)]
    results = []
    for in_order in (True, False):
        world = World(spec, lengths, in_order=in_order)
        backend = make(kind, spec, library)
        world.attach(backend)
        world.step(backend, [(i, 0, begin) for i, begin, _ in parts])
        results.append(world.step(backend, parts))
        for layer in range(world.layers):
            for part, out in zip(parts, results[-1][layer], strict=True):
                assert_close(out, world.expected(layer, part))
    for layer in range(len(results[0])):
        for ordered, dealt in zip(results[0][layer], results[1][layer], strict=True):
            assert torch.equal(ordered, dealt)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_a_fused_projection_are_taken_as_they_are(
    kind: str, library: KernelLibrary, dtype: torch.dtype
) -> None:
    spec = make_spec(dtype, q_heads=4, kv_heads=2)
    world = World(spec, [50], layers=1)
    backend = make(kind, spec, library)
    world.attach(backend)
    s = world.sequences[0]
    fused = torch.cat([s.q[0].flatten(1), s.k[0].flatten(1), s.v[0].flatten(1)], dim=1)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in fused.split([256, 128, 128], dim=1))
    backend.plan(world.batch([(0, 0, 50)]))
    out = torch.full((50, 6, 64), torch.nan, dtype=dtype)
    backend.forward(0, q, k, v, out[:, 1:5])
    assert_close(out[:, 1:5], world.expected(0, (0, 0, 50)))
    assert out[:, 0].isnan().all()
    assert out[:, 5].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_shows_in_that_request_only(
    kind: str, library: KernelLibrary, dtype: torch.dtype, which: str
) -> None:
    spec = make_spec(dtype)
    world = World(spec, [20, 20])
    getattr(world.sequences[0], which)[:, 3, 0, 5] = torch.nan
    backend = make(kind, spec, library)
    world.attach(backend)
    results = world.step(backend, [(0, 0, 20), (1, 0, 20)])
    for layer, (sick, healthy) in enumerate(results):
        assert sick[3].isnan().any()
        assert_close(healthy, world.expected(layer, (1, 0, 20)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(kind: str, library: KernelLibrary, dtype: torch.dtype) -> None:
    spec = make_spec(dtype)
    world = World(spec, [200], layers=1)
    world.sequences[0].q.mul_(40)
    world.sequences[0].k.mul_(40)
    backend = make(kind, spec, library)
    world.attach(backend)
    (result,) = world.step(backend, [(0, 0, 200)])
    # Scores in the thousands: almost all weight is on one key, and float32 resolves their differences to about 1e-3.
    error = (result[0].double() - world.expected(0, (0, 0, 200))).abs()
    assert torch.isfinite(result[0]).all()
    assert error.max() < (2e-3 if dtype == torch.float32 else 0.05)


def test_kernels_and_fallback_agree(library: KernelLibrary) -> None:
    spec = make_spec(torch.float32)
    world = World(spec, [100, 257])
    parts = [(0, 0, 100), (1, 0, 257)]
    kernels, fallback = CpuAttention(spec, library, threads=2), TorchAttention(spec)
    for backend in (kernels, fallback):
        world.attach(backend)
    for ours, theirs in zip(world.step(kernels, parts), world.step(fallback, parts), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
