"""Rotation, cache, norm and activation on the device, against the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the customary name

from tercet_shared.checkpoint import RopeConfig
from tercet_worker.layers.rope import RotaryEmbedding

pytest.importorskip("triton", reason="the kernels are checked with Triton's interpreter")

from tercet_worker.cuda.kernels.cache import rotate_and_write, write
from tercet_worker.cuda.kernels.layers import add_norm, silu_and_multiply
from tercet_worker.cuda.kernels.matmul import multiply

CPU = torch.device("cpu")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # The interpreter cuts what a GPU rounds: up to two units in the last of bfloat16's eight bits.
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head", "rotary", "block"),
    [(4, 2, 16, 16, 16), (9, 3, 64, 64, 16), (2, 1, 96, 32, 8), (1, 1, 128, 128, 1)],
)
def test_queries_are_rotated_and_keys_and_values_are_where_they_belong(
    query_heads: int, kv_heads: int, head: int, rotary: int, block: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(head)
    tokens, blocks = 7, 9
    rope = RotaryEmbedding(RopeConfig(theta=10_000.0, rotary_dim=rotary, scaling=None), CPU)
    wide = torch.randn((tokens, (query_heads + 2 * kv_heads) * head + 3), generator=generator).to(dtype)
    qkv = wide[:, :-3]  # tokens lie apart
    positions = torch.tensor([0, 1, 5, 1000, 7, 100_000, 3])
    places = torch.randperm(blocks * block, generator=generator)[:tokens] if blocks * block >= tokens else None
    assert places is not None
    places[2] = -1  # padding
    cache = torch.zeros((blocks, 2, block, kv_heads, head), dtype=dtype)
    expected = cache.clone()
    rotation = rope.rotation(positions)
    heads = qkv.reshape(tokens, -1, head).clone()
    rope.rotate_(heads[:, : query_heads + kv_heads], rotation)
    for token, place in enumerate(places.tolist()):
        if place >= 0:
            page, offset = divmod(place, block)
            expected[page, 0, offset] = heads[token, query_heads : query_heads + kv_heads]
            expected[page, 1, offset] = heads[token, query_heads + kv_heads :]
    queries = torch.empty((tokens, query_heads, head), dtype=dtype)
    rotate_and_write(qkv, rotation.cos, rotation.sin, places, queries, cache)
    torch.testing.assert_close(queries, heads[:, :query_heads], **tolerance(dtype))
    torch.testing.assert_close(cache[:, 0], expected[:, 0], **tolerance(dtype))
    assert torch.equal(cache[:, 1], expected[:, 1])  # values are copied


def test_a_cache_of_eight_bits_holds_scaled_values() -> None:
    # Numbers that eight bits hold exactly, so that nothing is rounded.
    keys, values = torch.randint(-8, 9, (2, 3, 2, 16), generator=torch.Generator().manual_seed(2)) / 4
    cache = torch.zeros((2, 2, 4, 2, 16), dtype=torch.float8_e4m3fn)
    write(keys, values, torch.tensor([5, -1, 2]), cache, scale_k=2.0, scale_v=0.5)
    expected = torch.zeros(cache.shape)
    for token, (page, offset) in ((0, (1, 1)), (2, (0, 2))):
        expected[page, 0, offset], expected[page, 1, offset] = keys[token] * 2.0, values[token] * 0.5
    assert torch.equal(cache.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (5, 100), (0, 64)])
def test_norm_of_a_stream_with_what_is_added(rows: int, width: int, adds: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    stream = torch.randn((rows, width), generator=generator) * 3
    x = torch.randn((rows, width), generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator)
    total = stream + x if adds else stream.clone()
    expected = F.rms_norm(total, (width,), weight, 1e-5).to(dtype)
    found = add_norm(stream, x if adds else None, weight, 1e-5, dtype)
    assert torch.equal(stream, total)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1536), (2, 1025), (0, 8)])
def test_gated_activation(rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn((rows, 2 * width), generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(silu_and_multiply(x), F.silu(gate) * up, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter's product of bfloat16 is wrong
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (70, 130), (1, 5)])
def test_a_row_of_the_invariant_product_does_not_depend_on_the_others(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn((rows, inputs), generator=generator).to(dtype) for rows in (67, outputs))
    bias = torch.randn(outputs, generator=generator).to(dtype)
    product = multiply(x, weight, bias, torch.float32)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(product.double(), expected, rtol=1e-4, atol=1e-4)
    for rows in (1, 3, 64, 65):
        assert torch.equal(multiply(x[:rows], weight, bias, torch.float32), product[:rows])
