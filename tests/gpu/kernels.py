"""Every kernel of the CUDA worker on the GPU, against the CPU's code; FlashInfer's attention, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_shared.checkpoint import RopeConfig
from tercet_worker.attention.flashinfer import FlashInferAttention
from tercet_worker.attention.interface import AttentionBatch, AttentionSpec, HostAttention
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.cuda.kernels.cache import rotate_and_write
from tercet_worker.cuda.kernels.inputs import hand_over, lay_out, list_pages
from tercet_worker.cuda.kernels.layers import add_norm, silu_and_multiply
from tercet_worker.cuda.kernels.matmul import multiply
from tercet_worker.cuda.kernels.sampling import draw_, penalize_, scan
from tercet_worker.graphs.dispatch import Choice, Mode
from tercet_worker.layers.fp8 import Fp8Choice, Fp8Matrix, Fp8Weights, quantize
from tercet_worker.layers.fp8 import multiply as multiply_fp8
from tercet_worker.layers.rope import RotaryEmbedding
from tercet_worker.platforms.cuda import Machine
from tercet_worker.sampling.changes import Penalties
from tercet_worker.sampling.noise import RowKeys, gumbel
from tercet_worker.sampling.sampler import best_of
from tercet_worker.state.mirror import ragged_index

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPEC = AttentionSpec(8, 2, 128, 16, BF16, 128**-0.5)
Check = tuple[str, Callable[[], None]]


def checks(machine: Machine, invariant: Machine) -> Iterator[Check]:
    """Yields the checks, by name; each raises where something is wrong.

    Args:
        machine: a GPU.
        invariant: the same for ``--batch-invariant``.
    """
    gpu = machine.device
    yield "input layout", lambda: _layout(gpu)
    yield "page lists, token hand-over", lambda: _lists(gpu)
    yield "rotation and cache", lambda: _rotation(gpu)
    yield "norm, activation, invariant product", lambda: _layers(gpu)
    yield "scan, draw with the same bits, penalties", lambda: _sampling(gpu)
    if machine.capability >= (8, 9):
        yield "product of eight bits", lambda: _fp8_product(machine)
    yield "FlashInfer's kernels: compile, or load", lambda: _compile(machine)
    for name, counts, contexts, mode in (
        ("decode", [1] * 5, [1, 17, 300, 64, 1000], Mode.EAGER),
        ("decode, as in a graph with padding", [1] * 5, [1, 17, 300, 64, 1000], Mode.FULL),
        ("mixed", [1, 1, 40, 7], [90, 1, 40, 200], Mode.EAGER),
        ("long prompt", [700], [2048], Mode.EAGER),
    ):
        yield f"attention: {name}", lambda c=counts, x=contexts, m=mode: _attention(machine, c, x, m)  # type: ignore[misc]  # names of a loop
    cascade = [600 + row for row in range(12)]
    yield "attention: cascade", lambda: _attention(machine, [1] * 12, cascade, Mode.EAGER, shared=32)
    mixed = ([1, 1, 2, 40, 12, 700], [90, 5000, 2, 40, 200, 2048])
    yield "attention: batch-invariant", lambda: _attention(invariant, *mixed, Mode.EAGER, invariant=True)
    if machine.capability >= (8, 9):
        small = ([1, 1, 40], [90, 1, 40])
        yield "attention: cache of eight bits", lambda: _attention(machine, *small, Mode.EAGER, kv=FP8)


def _layout(gpu: torch.device) -> None:
    rng = np.random.default_rng(0)
    counts, computed = np.array([1, 1, 298, 700]), np.array([540, 129, 0, 16], np.int32)
    slots = np.array([5, 0, 3, 7], np.int32)
    tokens = torch.from_numpy(rng.integers(0, 50_000, (8, 2048), dtype=np.int32))
    tables = torch.from_numpy(rng.integers(0, 900, (8, 128), dtype=np.int32))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    unwritten = np.array([1, 0, 0, 16], np.int32)
    total, padded = 1000, 1024
    ids = torch.zeros(padded, dtype=torch.int32, device=gpu)
    positions, places = (torch.zeros(padded, dtype=torch.int64, device=gpu) for _ in range(2))
    lay_out(
        slots=torch.from_numpy(slots).to(gpu),
        starts=torch.from_numpy(starts).to(gpu),
        computed=torch.from_numpy(computed).to(gpu),
        unwritten=torch.from_numpy(unwritten).to(gpu),
        tokens=tokens.to(gpu),
        block_tables=tables.to(gpu),
        block_size=16,
        longest=700,
        padded=padded,
        total=total,
        token_ids=ids,
        positions=positions,
        slot_mapping=places,
    )
    row, place = ragged_index(counts)
    position = place + computed[row]
    page = tables[slots[row], position // 16].numpy().astype(np.int64)
    _same(ids[:total], tokens[slots[row], position])
    _same(positions[:total], torch.from_numpy(position))
    written = place >= unwritten[row]
    _same(places[:total], torch.from_numpy(np.where(written, page * 16 + position % 16, -1)))
    _same(places[total:], torch.full((padded - total,), -1))
    _same(ids[total:], torch.zeros(padded - total, dtype=torch.int32))


def _lists(gpu: torch.device) -> None:
    rng = np.random.default_rng(1)
    tables = torch.from_numpy(rng.integers(0, 9000, (8, 400), dtype=np.int32)).to(gpu)
    lengths, firsts, slots = [300, 1, 256, 0], [0, 7, 3, 9], [5, 0, 7, 2]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    pages = torch.zeros(600, dtype=torch.int32, device=gpu)
    list_pages(
        slots=torch.tensor(slots, dtype=torch.int32, device=gpu),
        firsts=torch.tensor(firsts, dtype=torch.int32, device=gpu),
        offsets=torch.from_numpy(offsets).to(gpu),
        block_tables=tables,
        most=300,
        pages=pages,
    )
    wanted = [tables[slot, first : first + n] for slot, first, n in zip(slots, firsts, lengths, strict=True)]
    _same(pages[: offsets[-1]], torch.cat(wanted))
    buffer = torch.full((400, 64), -1, dtype=torch.int32, device=gpu)
    rows, places = rng.permutation(400)[:300], rng.integers(0, 64, 300, dtype=np.int32)
    drawn = torch.from_numpy(rng.integers(0, 50_000, 300)).to(gpu)
    expected = buffer.clone()
    expected[rows, places] = drawn.to(torch.int32)
    hand_over(buffer, torch.from_numpy(rows).to(gpu), torch.from_numpy(places).to(gpu), drawn)
    _same(buffer, expected)


def _rotation(gpu: torch.device) -> None:
    tokens, query, kv, head, block = 33, 32, 8, 128, 16
    rope = RotaryEmbedding(RopeConfig(theta=500_000.0, rotary_dim=head, scaling=None), gpu)
    qkv = torch.randn((tokens, (query + 2 * kv) * head), device=gpu).to(BF16)
    positions = torch.randint(0, 130_000, (tokens,), device=gpu)
    places = torch.randperm(tokens * 2, device=gpu)[:tokens]
    cache = torch.zeros((tokens, 2, block, kv, head), dtype=BF16, device=gpu)
    queries = torch.empty((tokens, query, head), dtype=BF16, device=gpu)
    rotation = rope.rotation(positions)
    rotate_and_write(qkv, rotation.cos, rotation.sin, places, queries, cache)
    heads = qkv.view(tokens, -1, head).clone()
    rope.rotate_(heads[:, : query + kv], rotation)
    _close(queries, heads[:, :query])
    _close(cache[places // block, 0, places % block], heads[:, query : query + kv])
    _same(cache[places // block, 1, places % block], heads[:, query + kv :])


def _layers(gpu: torch.device) -> None:
    stream, x = torch.randn((77, 4096), device=gpu) * 3, torch.randn((77, 4096), device=gpu).to(BF16)
    weight = torch.randn(4096, device=gpu)
    total = stream + x
    normed = add_norm(stream, x, weight, 1e-5, BF16)
    _close(stream, total, 1e-6)
    _close(normed, F.rms_norm(total, (4096,), weight, 1e-5).to(BF16))
    gates = torch.randn((77, 2 * 14336), device=gpu).to(BF16)
    gate, up = gates.chunk(2, dim=1)
    _close(silu_and_multiply(gates), F.silu(gate) * up)
    matrix = torch.randn((1000, 4096), device=gpu).to(BF16) / 64
    product = multiply(x, matrix, None, torch.float32)
    _close(product, x.float() @ matrix.float().t(), 1e-3)
    for rows in (1, 3, 64, 65):
        _same(multiply(x[:rows], matrix, None, torch.float32), product[:rows])


def _fp8_product(machine: Machine) -> None:
    gpu = machine.device
    for row_scaled in (True, False) if machine.capability < (11, 0) else (False,):
        for parts, columns in (((4096, 1024, 1024), 4096), ((33, 9), 70)):
            choice = Fp8Choice(every=True, row_scaled=row_scaled)
            matrix = Fp8Matrix(columns, parts, bias=True, dtype=BF16, device=gpu, choice=choice)
            for part, rows in enumerate(parts):
                matrix.weight_destination(part).store(0, torch.randn((rows, columns), device=gpu) * 10**part)
                destination = matrix.bias_destination(part)
                assert destination is not None
                destination.store(0, torch.randn(rows, device=gpu))
            held = matrix.held
            assert isinstance(held, Fp8Weights)
            assert held.bias is not None
            kept = (held.weight.double() * held.scales.double().t())[: sum(parts), :columns]
            for tokens in (1, 17, 300):
                x = torch.randn((tokens, columns), device=gpu).to(BF16)
                q, scales = quantize(x)
                _same(q.view(torch.uint8), quantize(x.cpu())[0].view(torch.uint8))
                found = multiply_fp8(
                    x, held.weight, held.scales, held.one, held.bias, outputs=held.outputs, row_scaled=row_scaled
                )
                inputs = q.double() * scales.double()
                expected = inputs @ kept.t() + held.bias.double()
                # What is added up, however much of it cancels.
                size = inputs.abs() @ kept.abs().t() + held.bias.double().abs()
                worst = float(((found.double() - expected).abs() / size).max())
                assert worst < 2**-8, f"{tokens} tokens, {sum(parts)} x {columns}: {worst:.5f} of what is added up"


def _sampling(gpu: torch.device) -> None:
    rows, vocab = 64, 128_256
    logits = torch.randn((rows, vocab), device=gpu) * 2
    highest, tokens, finite = scan(logits)
    for found, expected in zip((highest, tokens, finite), best_of(logits), strict=True):
        _same(found, expected)
    words = torch.from_numpy(np.random.default_rng(2).integers(-(2**31), 2**31, (3, rows), dtype=np.int32)).to(gpu)
    keys = RowKeys.of(words[0], words[1], words[2])
    heat, low = torch.rand(rows, device=gpu) * 2 + 0.05, torch.full((rows,), -torch.inf, device=gpu)
    draw_(logits, highest, heat, low, keys, torch.arange(rows, device=gpu), tokens)
    scores = (logits - highest.unsqueeze(1)) / heat.unsqueeze(1)
    scores += gumbel(keys, torch.arange(vocab, dtype=torch.int32, device=gpu))
    # Another logarithm may round another way: the token that was drawn is as good as the best.
    best = scores.max(dim=1).values
    _close(scores.gather(1, tokens.unsqueeze(1)).squeeze(1), best, 1e-4)
    owner = torch.arange(5, device=gpu).repeat_interleave(200)
    columns = {
        "rows": torch.tensor([6, 1, 0, 3, 4], device=gpu),
        "owner": owner,
        "tokens": torch.randint(0, 90, (1000,), device=gpu),
        "output": (torch.rand(1000, device=gpu) < 0.6).float(),
        "repetition": torch.tensor([1.0, 1.3, 0.7, 2.0, 1.1], device=gpu),
        "frequency": torch.tensor([0.5, 0.0, -0.25, 1.0, 0.1], device=gpu),
        "presence": torch.tensor([0.0, 0.7, 0.3, -1.0, 0.2], device=gpu),
    }
    expected, counts = logits.clone(), torch.zeros((5, vocab), device=gpu)
    Penalties(offsets=np.arange(0, 1001, 200), **columns).apply_(expected, torch.zeros_like(counts))
    penalize_(logits, counts, **columns)
    _close(logits, expected, 1e-5)
    _same(counts, torch.zeros_like(counts))


def _compile(machine: Machine) -> None:
    """Has what the checks use compiled at once: one after the other takes twice as long."""

    def warm(tokens: int, shared: int, kv: torch.dtype | None) -> None:
        own = FlashInferAttention(SPEC, machine.wrappers, machine.streams, machine.device, max_rows=4, kv_dtype=kv)
        own.allocate_kv(1, 64)
        own.reserve(64)
        own._try([tokens], shared)

    wanted: list[tuple[int, int, torch.dtype | None]] = [(1, 0, None), (128, 0, None)]
    if machine.capability >= (8, 9):
        wanted.append((1, 0, FP8))
    with ThreadPoolExecutor(len(wanted)) as threads:
        for done in [threads.submit(warm, *each) for each in wanted]:
            done.result()
    warm(1, 1, None)


def _attention(
    machine: Machine,
    counts: list[int],
    contexts: list[int],
    mode: Mode,
    *,
    shared: int = 0,
    invariant: bool = False,
    kv: torch.dtype | None = None,
) -> None:
    rows, gpu = len(counts), machine.device
    rng = np.random.default_rng(rows)
    longest = -(-max(contexts) // 16)
    blocks = rows * longest + 7
    # Rows are at the end of the tables, and what was never written to is nowhere in the cache.
    table = torch.full((rows + 3, longest), 2**30, dtype=torch.int32)
    order = torch.arange(3, rows + 3, dtype=torch.int32)
    table[3:] = torch.from_numpy(rng.permutation(blocks)[: rows * longest].reshape(rows, longest).astype(np.int32))
    if shared:
        table[3:, :shared] = table[3, :shared]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    lens, total = np.array(contexts, np.int32), int(starts[-1])
    tokens = 8 if mode is Mode.FULL else total
    host = HostAttention(starts, lens, shared, Choice(mode, tokens))
    places = torch.full((tokens,), -1, dtype=torch.int64)
    where, place = ragged_index(np.array(counts))
    position = place + (lens - np.array(counts))[where]
    places[:total] = table[where + 3, position // 16].long() * 16 + torch.from_numpy(position % 16)
    reference = TorchAttention(SPEC)
    reference.allocate_kv(1, blocks)
    own = FlashInferAttention(
        SPEC, machine.wrappers, machine.streams, gpu, max_rows=64, kv_dtype=kv, batch_invariant=invariant
    )
    own.allocate_kv(1, blocks)
    own.reserve(rows * longest + 64)
    own.warm_up()
    filled = torch.randn((blocks, 2, 16, 2, 128)).to(kv or BF16).to(BF16)
    assert own._cache is not None
    assert reference._cache is not None
    own._cache[0].copy_(filled.to(own._cache.dtype))
    reference._cache[0].copy_(filled.transpose(0, 1).reshape(2, blocks * 16, 2, 128))
    q, k, v = (torch.randn((tokens, heads, 128)).to(kv or BF16).to(BF16) for heads in (8, 2, 2))
    expected = torch.zeros_like(q)
    batch = {"query_start_loc": torch.from_numpy(starts), "seq_lens": torch.from_numpy(lens), "slots": order}
    reference.plan(AttentionBatch(**batch, block_table=table, slot_mapping=places, max_query_len=1, num_tokens=tokens))
    reference.forward(0, q, k, v, expected)
    out = torch.zeros_like(q, device=gpu)
    there = {name: tensor.to(gpu) for name, tensor in batch.items()}
    own.plan(
        AttentionBatch(
            **there,
            block_table=table.to(gpu),
            slot_mapping=places.to(gpu),
            max_query_len=1,
            num_tokens=tokens,
            host=host,
        )
    )
    own.forward(0, q.to(gpu), k.to(gpu), v.to(gpu), out)
    _close(out[:total].cpu(), expected[:total])


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found.cpu(), expected.cpu()):
        raise AssertionError(f"{int((found.cpu() != expected.cpu()).sum())} of {found.numel()} elements differ")


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)
