"""The prefix index says what a table of sets says, whatever cores send, and stays within its bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tercet_frontend.routing import index as index_module
from tercet_frontend.routing.chains import ChainMemory, PromptChain
from tercet_frontend.routing.index import PrefixIndex
from tercet_shared.hashing import BlockKey, chain, root_key
from tercet_shared.registry.interface import BlockBatch

ROOT = root_key("weights")
LENGTH = 5
PROMPTS = [np.array(bits, np.int32) for bits in itertools.product((0, 1), repeat=LENGTH)]  # one token per block
SOME = PROMPTS[::5]
KEYS = sorted({key for prompt in SOME for key in chain(ROOT, prompt, 1)})
CORES = [f"core-{number}" for number in range(4)]


def prompt_chain(tokens: np.ndarray, memory: ChainMemory | None = None) -> PromptChain:
    return PromptChain(ROOT, tokens, 1, len(tokens), ChainMemory() if memory is None else memory)


def depth(index: PrefixIndex, core: str, incarnation: str, tokens: np.ndarray, now: float = 0.0) -> int:
    """Returns how many blocks of a prompt the core has, as the index says."""
    number = index.number_of(core, incarnation)
    match = index.match(prompt_chain(tokens), now)
    if number is None or not match.ends:
        return 0
    return [0, *match.ends][match.counts(index.width)[number]]


class Reference:
    """One core, as plainly as can be."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.known: set[BlockKey] | None = None  # what the index should know
        self.latest = 0
        self.true: set[BlockKey] = set()  # what the core has
        self.sent = 0

    def depth(self, tokens: np.ndarray) -> int:
        if self.known is None:
            return 0
        return sum(1 for _ in itertools.takewhile(self.known.__contains__, chain(ROOT, tokens, 1)))


class IndexMachine(RuleBasedStateMachine):
    """Cores that store, evict, clear, restart, go, and whose events are lost or come twice."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.references = {core: Reference() for core in CORES}
        self.incarnations = itertools.count()
        for core in CORES:
            self.restart(core)

    @rule(core=st.sampled_from(CORES))
    def restart(self, core: str) -> None:
        reference = self.references[core] = Reference()
        reference.incarnation = str(next(self.incarnations))

    @rule(
        core=st.sampled_from(CORES),
        changes=st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS)), min_size=1, max_size=8),
        lost=st.integers(0, 9),
        again=st.integers(0, 3),
    )
    def change(self, core: str, changes: list[tuple[bool, BlockKey]], lost: int, again: int) -> None:
        reference = self.references[core]
        first = reference.sent + 1
        reference.sent += len(changes)
        for stored, key in changes:
            (reference.true.add if stored else reference.true.discard)(key)
        if lost == 0:
            return
        self.index.blocks(
            core, reference.incarnation, BlockBatch(first, [kind for kind, _ in changes], [key for _, key in changes])
        )
        if again == 0:  # the end of it comes a second time
            late = changes[len(changes) // 2 :]
            batch = BlockBatch(first + len(changes) // 2, [kind for kind, _ in late], [key for _, key in late])
            self.index.blocks(core, reference.incarnation, batch)
        if (reference.known is not None and reference.latest == first - 1) or first == 1:
            reference.known = set(reference.true)
            reference.latest = reference.sent
        else:
            reference.known = None

    @rule(core=st.sampled_from(CORES), clear=st.booleans())
    def snapshot(self, core: str, clear: bool) -> None:
        reference = self.references[core]
        if clear:
            reference.sent += 1
            reference.true.clear()
        self.index.blocks(
            core, reference.incarnation, BlockBatch(reference.sent, (), sorted(reference.true), snapshot=True)
        )
        reference.known, reference.latest = set(reference.true), reference.sent

    @rule(core=st.sampled_from(CORES))
    def forget(self, core: str) -> None:
        self.index.forget(core)
        self.restart(core)

    @invariant()
    def same(self) -> None:
        for tokens in SOME:
            for core, reference in self.references.items():
                assert depth(self.index, core, reference.incarnation, tokens) == reference.depth(tokens)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def batch(first: int, keys: list[BlockKey], *, stored: bool = True) -> BlockBatch:
    return BlockBatch(first, [stored] * len(keys), keys)


def test_a_match_ends_at_a_hole() -> None:
    index = PrefixIndex()
    keys = chain(ROOT, PROMPTS[0], 1)
    index.blocks("a", "1", batch(1, keys))
    index.blocks("a", "1", batch(6, [keys[2]], stored=False))
    assert depth(index, "a", "1", PROMPTS[0]) == 2
    index.blocks("a", "1", batch(7, [keys[2]]))
    assert depth(index, "a", "1", PROMPTS[0]) == LENGTH


def test_a_hole_is_seen_where_not_all_cores_pass_the_stretch() -> None:
    index = PrefixIndex()
    tokens = np.arange(40, dtype=np.int32)
    keys = chain(ROOT, tokens, 1)
    index.blocks("a", "1", batch(1, keys))
    index.blocks("a", "1", batch(41, keys[3:4], stored=False))
    assert depth(index, "a", "1", tokens) == 40, "overrated until a request has filled the hole"
    index.blocks("b", "1", batch(1, keys[:7]))
    assert depth(index, "a", "1", tokens) == 3
    assert depth(index, "b", "1", tokens) == 7


@pytest.mark.parametrize("held", [0, 1, 7, 8, 9, 31, 32, 33, 39, 40, 41, 63, 64, 70])
def test_every_length_of_a_prefix_is_found(held: int) -> None:
    index = PrefixIndex()
    tokens = np.arange(70, dtype=np.int32)
    keys = chain(ROOT, tokens, 1)
    index.blocks("a", "1", batch(1, keys[:held]))
    assert depth(index, "a", "1", tokens) == held
    index.blocks("b", "1", batch(1, keys))
    assert depth(index, "a", "1", tokens) == held
    assert depth(index, "b", "1", tokens) == 70


def test_what_an_older_snapshot_says_is_not_news() -> None:
    index = PrefixIndex()
    keys = chain(ROOT, PROMPTS[0], 1)
    index.blocks("a", "1", batch(1, keys))
    index.blocks("a", "1", BlockBatch(2, (), keys[:2], snapshot=True))
    assert depth(index, "a", "1", PROMPTS[0]) == LENGTH
    index.blocks("a", "1", batch(6, [keys[4]], stored=False))
    assert depth(index, "a", "1", PROMPTS[0]) == LENGTH - 1


def test_a_batch_whose_columns_differ_in_length_voids_its_core_only() -> None:
    index = PrefixIndex()
    keys = chain(ROOT, PROMPTS[0], 1)
    for core in ("a", "b"):
        index.blocks(core, "1", batch(1, keys))
    index.blocks("a", "1", BlockBatch(6, [True], keys))
    assert index.number_of("a", "1") is None
    assert depth(index, "b", "1", PROMPTS[0]) == LENGTH


def test_a_thousand_cores_and_many_restarts_find_their_numbers() -> None:
    index = PrefixIndex()
    draw = random.Random(1)
    tokens = np.arange(40, dtype=np.int32)
    keys = chain(ROOT, tokens, 1)
    depths = {}
    for number in range(1_000):
        depths[f"core-{number}"] = ("0", draw.randrange(41))
    for turn in range(1, 301):
        depths[f"core-{draw.randrange(1_000)}"] = (str(turn), draw.randrange(41))
    for core, (incarnation, held) in depths.items():
        index.blocks(core, "-1", BlockBatch(9, (), keys, snapshot=True))
        index.blocks(core, incarnation, BlockBatch(9, (), keys[:held], snapshot=True))
    match = index.match(prompt_chain(tokens), 0.0)
    counts = match.counts(index.width)
    for core, (incarnation, held) in depths.items():
        number = index.number_of(core, incarnation)
        assert number is not None
        assert [0, *match.ends][counts[number]] == held
    assert index.width <= 2_048, "numbers of cores that are gone are used again"
    for core in depths:
        index.forget(core)
    for _ in range(200):
        index.forget("nobody")
    assert index.pairs == 0


def random_keys(seed: int, count: int) -> list[BlockKey]:
    raw = random.Random(seed).randbytes(16 * count)
    return [BlockKey(raw[at : at + 16]) for at in range(0, len(raw), 16)]


def test_memory_is_bounded_by_a_coarser_grain_and_matches_end_at_most_a_little_early() -> None:
    index = PrefixIndex(most_pairs=2_000)
    tokens = np.arange(400, dtype=np.int32)
    keys = chain(ROOT, tokens, 1)
    for core in range(20):
        index.blocks(str(core), "1", batch(1, keys[: 20 * core] + random_keys(core, 1_000)))
    for core in range(20):  # the work is done as batches come
        index.blocks(str(core), "1", batch(1_001 + 20 * core, random_keys(100 + core, 10)))
    assert index.coarseness > 1
    assert index.pairs <= 2_500
    for core in range(20):
        true, found = 20 * core, depth(index, str(core), "1", tokens)
        assert true - 20 * index.coarseness < found <= true
    assert depth(index, "19", "1", tokens) > 200


def test_a_finer_grain_comes_back_once_nothing_is_known() -> None:
    index = PrefixIndex(most_pairs=10)
    index.blocks("a", "1", batch(1, random_keys(1, 500)))
    index.forget("a")
    for _ in range(5):
        index.forget("a-nobody")
    assert (index.pairs, index.coarseness) == (0, 1)
    index.blocks("a", "2", batch(1, chain(ROOT, PROMPTS[3], 1)))
    assert depth(index, "a", "2", PROMPTS[3]) == LENGTH


def test_a_core_that_says_it_has_more_than_any_can_have_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MOST_PAIRS_OF_CORE", 100)
    index = PrefixIndex()
    index.blocks("liar", "1", batch(1, random_keys(1, 101)))
    index.blocks("other", "1", batch(1, random_keys(1, 100)))
    assert index.number_of("liar", "1") is None
    index.blocks("liar", "1", BlockBatch(102, (), random_keys(1, 101), snapshot=True))
    assert index.number_of("liar", "1") is None
    assert index.number_of("other", "1") is not None


# -- what is expected

LONG = np.arange(20, dtype=np.int32)
LONG_KEYS = chain(ROOT, LONG, 1)
NOTED = 16
"""Of its blocks, as one in eight is noted."""


@pytest.fixture
def expecting() -> tuple[PrefixIndex, Callable[[float], int]]:
    """An index that expects a core to have a prompt at time 0, and how deep it says that goes."""
    index = PrefixIndex()
    index.blocks("a", "1", BlockBatch(0, (), (), snapshot=True))
    expect(index, 0.0)
    return index, lambda now: depth(index, "a", "1", LONG, now)


def expect(index: PrefixIndex, now: float) -> None:
    number = index.number_of("a", "1")
    assert number is not None
    index.match(prompt_chain(LONG), now)
    index.expect(number, LONG_KEYS, 0, now)


def test_what_is_expected_counts_for_a_while(expecting: tuple[PrefixIndex, Callable[[float], int]]) -> None:
    _, found = expecting
    assert [found(0.0), found(15_000.0), found(25_000.0), found(45_000.0)] == [NOTED, NOTED, NOTED, 0]


def test_what_is_expected_joins_on_to_what_is_known(expecting: tuple[PrefixIndex, Callable[[float], int]]) -> None:
    index, found = expecting
    index.blocks("b", "1", batch(1, LONG_KEYS[:18]))
    index.blocks("a", "1", batch(1, LONG_KEYS[16:18]))
    assert found(1.0) == 18
    assert depth(index, "b", "1", LONG, 1.0) == 18


def test_an_eviction_ends_what_was_expected(expecting: tuple[PrefixIndex, Callable[[float], int]]) -> None:
    index, found = expecting
    index.blocks("a", "1", batch(1, LONG_KEYS[:7:-1], stored=False))  # tails go first
    assert found(1.0) == 8


def test_a_core_that_is_gone_is_expected_to_have_nothing(
    expecting: tuple[PrefixIndex, Callable[[float], int]],
) -> None:
    index, found = expecting
    index.forget("a")
    assert found(1.0) == 0
    index.blocks("a", "1", BlockBatch(5, (), (), snapshot=True))
    assert found(1.0) == 0


def test_nothing_is_expected_any_more_of_a_core_that_caches_nothing(
    expecting: tuple[PrefixIndex, Callable[[float], int]],
) -> None:
    index, found = expecting
    now = 0.0
    for _ in range(4):
        now += 20_000.0
        expect(index, now)
    assert found(now) == 0
    index.blocks("a", "1", batch(1, [KEYS[0]]))
    assert found(now) == NOTED


def test_what_is_expected_is_bounded() -> None:
    index = PrefixIndex()
    index.blocks("a", "1", BlockBatch(0, (), (), snapshot=True))
    for seed in range(80):
        index.expect(0, random_keys(seed, 8_000), 0, 0.0)
    assert 32_768 <= len(index._expected) <= 2 * 32_768 + 1_000


# -- the chain


def test_a_chain_is_the_one_of_the_core_however_it_is_read() -> None:
    memory = ChainMemory(most=3)
    draw = np.random.default_rng(0)
    base = draw.integers(0, 9, 1_000, dtype=np.int32)
    for cut in (1_000, 700, 333, 1_000, 15, 0):
        tokens = np.concatenate([base[:cut], draw.integers(0, 9, 1_000 - cut, dtype=np.int32)])
        made = PromptChain(ROOT, tokens, 4, 249, memory)
        while made.grow():
            pass
        assert made.keys == chain(ROOT, tokens, 4, blocks=249)
