"""A compiled step against the same model executed by torch, and row by row against itself, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tercet_shared.checkpoint import ModelConfig, RopeConfig
from tercet_shared.errors import InternalError
from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.attention.interface import AttentionBatch, AttentionSpec
from tercet_worker.attention.torch_fallback import TorchAttention
from tercet_worker.kernels.library import Isa, KernelLibrary
from tercet_worker.layers.parameters import Placement
from tercet_worker.models import create_model
from tercet_worker.models.eager import EagerModel
from tercet_worker.program.compiled import CompiledModel
from tercet_worker.program.recorder import EXTERNAL, Recorder
from tercet_worker.program.weights import PackedWeights

DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]
VOCAB, MAX_TOKENS, BLOCK, MAX_LEN = 203, 80, 16, 96
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    family="llama",
    hidden_size=72,
    intermediate_size=120,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, rotary_dim=32),
    hidden_act="silu",
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    dtype=None,
    bos_token_id=None,
    eos_token_ids=(),
    raw={},
)
VARIANTS = [
    pytest.param(CONFIG, id="tied"),
    pytest.param(replace(CONFIG, tie_word_embeddings=False, attention_bias=True, mlp_bias=True), id="own-head-biases"),
]


@pytest.fixture(params=[isa.name for isa in Isa])
def isa(request: pytest.FixtureRequest, library: KernelLibrary) -> Isa:
    chosen = Isa[request.param]
    if chosen not in library.isas():
        pytest.skip(f"this machine has no {request.param}")
    return chosen


def spec_of(config: ModelConfig, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        block_size=BLOCK,
        dtype=dtype,
        scale=config.head_dim**-0.5,
    )


class World:
    """Two copies of one random model: compiled, and executed by torch."""

    def __init__(
        self, library: KernelLibrary, config: ModelConfig, dtype: torch.dtype, isa: Isa, threads: int = 2
    ) -> None:
        cpu = torch.device("cpu")
        eager = create_model(config, Placement(dtype, cpu))
        packed = create_model(config, Placement(dtype, cpu, PackedWeights(library, dtype)))
        generator = torch.Generator().manual_seed(3)
        targets = packed.destinations()
        assert targets.keys() == eager.destinations().keys()
        for name, destination in eager.destinations().items():
            assert targets[name].shape == destination.shape
            rows = torch.randn(destination.shape, generator=generator) * (0.1 if len(destination.shape) == 2 else 0.5)
            rows = (rows + 1 if "norm" in name else rows).to(dtype)
            for target in (destination, targets[name]):
                target.store(0, rows)
        self.head = targets.get("lm_head.weight", targets["model.embed_tokens.weight"])
        spec = spec_of(config, dtype)
        self.eager = EagerModel(eager)
        self.reference = TorchAttention(spec)
        self.attention = CpuAttention(spec, library, threads=threads, isa=isa)
        self.compiled = CompiledModel(
            packed, library, dtype=dtype, threads=threads, max_tokens=MAX_TOKENS, vocab_size=config.vocab_size, isa=isa
        )
        for backend in (self.reference, self.attention):
            backend.allocate_kv(config.num_layers, 4 * MAX_LEN // BLOCK)
        self.tokens = torch.randint(0, config.vocab_size, (4, MAX_LEN), generator=generator, dtype=torch.int32)
        self.table = torch.randperm(4 * MAX_LEN // BLOCK, generator=generator).to(torch.int32).view(4, -1).contiguous()

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, AttentionBatch]:
        """Returns ids, positions and the attention batch for tokens [begin, end) of each (request, begin, end)."""
        ids = torch.cat([self.tokens[row, begin:end] for row, begin, end in parts])
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        owner = torch.cat([torch.full((end - begin,), row) for row, begin, end in parts])
        counts = torch.tensor([0, *(end - begin for _, begin, end in parts)])
        return (
            ids,
            positions,
            AttentionBatch(
                query_start_loc=counts.cumsum(0).to(torch.int32),
                seq_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
                slots=torch.tensor([row for row, _, _ in parts], dtype=torch.int32),
                block_table=self.table,
                slot_mapping=self.table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK,
                max_query_len=int(counts.max()),
                num_tokens=len(ids),
            ),
        )

    def run(self, parts: list[tuple[int, int, int]]) -> Tensor:
        """Returns the compiled model's logits of all tokens."""
        ids, positions, batch = self.batch(parts)
        self.attention.plan(batch)
        return self.compiled.logits(self.compiled.forward(ids, positions, self.attention))

    @torch.inference_mode()
    def expected(self, parts: list[tuple[int, int, int]]) -> Tensor:
        ids, positions, batch = self.batch(parts)
        self.reference.plan(batch)
        return self.eager.logits(self.eager.forward(ids, positions, self.reference))


STEPS: list[list[tuple[int, int, int]]] = [
    [(0, 0, 40), (1, 0, 1), (2, 0, 17)],
    [(1, 1, 2), (0, 40, 41), (2, 17, 60), (3, 0, 33)],
    [(0, 41, 42), (1, 2, 3), (2, 60, 61), (3, 33, 34)],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", VARIANTS)
def test_the_same_logits_as_torch(isa: Isa, library: KernelLibrary, config: ModelConfig, dtype: torch.dtype) -> None:
    world = World(library, config, dtype, isa)
    for parts in STEPS:
        found, exact = world.run(parts), world.expected(parts)
        assert found.dtype == torch.float32
        if dtype == torch.float32:
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
            assert torch.equal(found.argmax(1), exact.argmax(1))
        else:
            assert float((found - exact).square().mean().sqrt()) < 0.02 * float(exact.std())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3, 20])  # 20: fewer rows than units
def test_prefill_chunk_and_decode_are_the_same_to_the_bit(
    isa: Isa, library: KernelLibrary, dtype: torch.dtype, threads: int
) -> None:
    whole = World(library, CONFIG, dtype, isa).run([(0, 0, 50)])
    world = World(library, CONFIG, dtype, isa, threads)
    cut = [
        world.run([(1, 0, 20), (0, 0, 33)])[20:],
        world.run([(0, 33, 34)]),
        world.run([(0, 34, 49), (2, 0, 60)])[:15],
    ]
    cut.append(world.run([(1, 20, 21), (2, 60, 61), (0, 49, 50)])[2:])
    assert torch.equal(torch.cat(cut), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab_size", [15, 203, 2051])  # less than a panel, one piece, several
def test_the_best_logit_is_that_of_the_logits(
    isa: Isa, library: KernelLibrary, dtype: torch.dtype, threads: int, vocab_size: int
) -> None:
    world = World(library, replace(CONFIG, vocab_size=vocab_size), dtype, isa, threads)
    for rows in (1, 5, 31, 32, 77):
        hidden = torch.randn((rows, CONFIG.hidden_size), generator=torch.Generator().manual_seed(rows)).to(dtype)
        logits = world.compiled.logits(hidden)
        highest, tokens, finite = world.compiled.best(hidden)
        assert torch.equal(highest, logits.max(1).values)
        assert torch.equal(tokens, logits.argmax(1))
        assert finite.all()
        # What the calls keep between them is of the call, not of the program.
        assert torch.equal(world.compiled.logits(hidden), logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_of_equal_logits_the_first_is_the_best(
    isa: Isa, library: KernelLibrary, dtype: torch.dtype, threads: int
) -> None:
    config = replace(CONFIG, vocab_size=2051, tie_word_embeddings=False)
    world = World(library, config, dtype, isa, threads)
    rows = torch.zeros((config.vocab_size, config.hidden_size), dtype=dtype)
    rows[[300, 301, 1_900]] = 1.0
    world.head.store(0, rows)
    hidden = torch.ones((40, config.hidden_size), dtype=dtype)
    hidden[7] = -1.0  # all but three logits are 0
    _, tokens, _ = world.compiled.best(hidden)
    assert tokens.tolist() == [300] * 7 + [0] + [300] * 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_whose_logits_are_not_all_finite_are_found(
    isa: Isa, library: KernelLibrary, dtype: torch.dtype, value: float
) -> None:
    config = replace(CONFIG, vocab_size=2051, tie_word_embeddings=False)
    world = World(library, config, dtype, isa)
    rows = torch.zeros((config.vocab_size, config.hidden_size), dtype=dtype)
    rows[1_024, 5] = value
    world.head.store(0, rows)
    for count in (3, 40):
        hidden = torch.zeros((count, config.hidden_size), dtype=dtype)
        assert not world.compiled.best(hidden)[2].any()  # 0 times what is not finite
        rows[1_024, 5] = 0.0
        world.head.store(0, rows)
        hidden[1, 3] = value
        rows[9, 3] = 1.0
        world.head.store(0, rows)
        expected = torch.ones(count, dtype=torch.bool)
        expected[1] = False
        assert torch.equal(world.compiled.best(hidden)[2], expected)
        rows[9, 3] = 0.0
        rows[1_024, 5] = value
        world.head.store(0, rows)


def test_what_does_not_fit_is_refused(library: KernelLibrary) -> None:
    world = World(library, CONFIG, torch.float32, library.best_isa)
    ids, positions, batch = world.batch([(0, 0, 5)])
    with pytest.raises(InternalError, match="PLAN"):
        world.compiled.forward(ids, positions, world.attention)
    world.attention.plan(batch)
    with pytest.raises(InternalError, match="PLAN"):
        world.compiled.forward(ids[:4], positions[:4], world.attention)
    with pytest.raises(InternalError, match="attention of the kernels"):
        world.compiled.forward(ids, positions, world.reference)
    with pytest.raises(InternalError, match="81 tokens"):
        world.compiled.forward(torch.zeros(81, dtype=torch.int32), torch.zeros(81, dtype=torch.int64), world.attention)
    ids[3] = VOCAB
    with pytest.raises(InternalError, match="TOKEN_ID"):
        world.compiled.forward(ids, positions, world.attention)


def test_fewer_attention_threads_than_the_team_are_refused(library: KernelLibrary) -> None:
    world = World(library, CONFIG, torch.float32, library.best_isa, threads=2)
    narrow = CpuAttention(spec_of(CONFIG, torch.float32), library, threads=1)
    narrow.allocate_kv(CONFIG.num_layers, 24)
    ids, positions, batch = world.batch([(0, 0, 5)])
    narrow.plan(batch)
    with pytest.raises(InternalError, match="PLAN"):
        world.compiled.forward(ids, positions, narrow)


def test_values_share_memory_only_where_their_lives_do_not_overlap(library: KernelLibrary) -> None:
    model = create_model(CONFIG, Placement(torch.float32, torch.device("cpu"), PackedWeights(library, torch.float32)))
    recorder = Recorder(torch.float32)
    hidden = model.hidden(recorder)
    model.logits(recorder, EXTERNAL)
    placed = recorder.place(10, hidden)
    records = recorder.records
    lives: dict[int, list[int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    for index, record in enumerate(records):
        for value, address in ((record.input, record.op.input), (record.output, record.op.output)):
            if value is not EXTERNAL:
                assert address is not None
                lives.setdefault(id(value), []).append(index)
                spans[id(value)] = (address, address + 10 * value.stride)
    lives[id(hidden)].append(len(records))
    for one, (begin, end) in spans.items():
        for other, (start, stop) in spans.items():
            if one != other and begin < stop and start < end:
                assert max(lives[one]) < min(lives[other]) or max(lives[other]) < min(lives[one])
    assert len(placed.memory) < sum(end - begin for begin, end in spans.values()), "nothing is shared"
    assert spans[id(hidden)][0] == placed.result.data_ptr()
