"""Which part of a model each rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet_shared.checkpoint import Checkpoint, ModelConfig
from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_worker.layers.cut import Cut
from tercet_worker.parallel.places import local_ranks, speaker, topology_of
from tercet_worker.parallel.topology import Share, Topology
from tests.fakes.checkpoints import write_tiny_llama


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return Checkpoint.open(str(write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny"))).config


def shares(config: ModelConfig, tensor: int, pipeline: int = 1, **sizes: int) -> list[Share]:
    own = replace(config, **sizes)  # type: ignore[arg-type]
    return [Topology(tensor, pipeline, rank).share(own) for rank in range(tensor * pipeline)]


def whole(cuts: list[Cut]) -> bool:
    """Returns whether the cuts follow one another and leave nothing out."""
    return [cut.begin for cut in cuts] == [0, *(cut.end for cut in cuts[:-1])] and cuts[-1].end == cuts[0].whole


def test_ranks_are_numbered_stage_by_stage() -> None:
    places = [Topology(2, 3, rank) for rank in range(6)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.tp_rank for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.answers for place in places] == [False, False, False, False, True, False]
    assert [place.first for place in places] == [True, True, False, False, False, False]
    assert [place.last for place in places] == [False, False, False, False, True, True]
    assert places[1].peer(2) == 5


def test_stages_have_consecutive_layers_and_the_last_no_more_than_others(config: ModelConfig) -> None:
    found = [share.layers for share in shares(config, 1, 4, num_layers=30)]
    assert found == [range(8), range(8, 16), range(16, 23), range(23, 30)]
    first, middle, *_, last = shares(config, 1, 4, num_layers=30)
    assert (first.first, first.last, middle.first, middle.last, last.last) == (True, False, False, False, True)


def test_uneven_heads_stay_in_whole_groups(config: ModelConfig) -> None:
    first, second = shares(config, 2, num_heads=9, num_kv_heads=3)  # SmolLM2's
    assert (first.query_heads, first.kv_heads) == (Cut(9, 0, 6), Cut(3, 0, 2))
    assert (second.query_heads, second.kv_heads) == (Cut(9, 6, 9), Cut(3, 2, 3))


def test_ranks_beyond_the_key_value_heads_divide_their_query_heads(config: ModelConfig) -> None:
    found = shares(config, 3, num_heads=8, num_kv_heads=2)
    assert [share.kv_heads for share in found] == [Cut(2, 0, 1), Cut(2, 0, 1), Cut(2, 1, 2)]
    assert [share.query_heads for share in found] == [Cut(8, 0, 2), Cut(8, 2, 4), Cut(8, 4, 8)]


@given(
    tensor=st.integers(1, 12),
    kv=st.integers(1, 8),
    group=st.integers(1, 8),
    inner=st.integers(12, 4096),
    vocab=st.integers(144, 5000),
)
def test_all_shares_together_are_the_model(
    config: ModelConfig, tensor: int, kv: int, group: int, inner: int, vocab: int
) -> None:
    if tensor > kv * group:
        return
    found = shares(config, tensor, num_heads=kv * group, num_kv_heads=kv, intermediate_size=inner, vocab_size=vocab)
    assert whole([share.query_heads for share in found])
    assert whole([share.inner for share in found])
    assert whole([share.vocab for share in found])
    assert {len(share.vocab) for share in found[:-1]} <= {found[0].vocab_rows}
    assert [share.leads for share in found] == [True] + [False] * (tensor - 1)
    for share in found:
        assert len(share.query_heads) % len(share.kv_heads) == 0
        # Every query head has its own key/value head here.
        assert share.query_heads.begin // group >= share.kv_heads.begin
        assert (share.query_heads.end - 1) // group < share.kv_heads.end
        assert len(share.inner) > 0


def test_the_inner_dimension_is_cut_between_blocks_of_quantized_weights(config: ModelConfig) -> None:
    blocks = shares(config, 3, num_heads=3, num_kv_heads=3, intermediate_size=1600)
    assert [share.inner for share in blocks] == [Cut(1600, 0, 544), Cut(1600, 544, 1088), Cut(1600, 1088, 1600)]
    odd = shares(config, 3, num_heads=3, num_kv_heads=3, intermediate_size=100)
    assert [len(share.inner) for share in odd] == [34, 33, 33]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (1, 3, "--pipeline-parallel-size 3: the model has only 2 layers"),
        (5, 1, "--tensor-parallel-size 5: the model has only 4 query heads"),
    ],
)
def test_what_cannot_be_divided(config: ModelConfig, tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology(tensor, pipeline, 0).share(config)


def test_a_vocabulary_that_leaves_a_rank_without_rows(config: ModelConfig) -> None:
    with pytest.raises(ConfigurationError, match="a vocabulary of 9 cannot be divided so"):
        Topology(8, 1, 7).share(replace(config, vocab_size=9, num_heads=8, num_kv_heads=8))


def settings(*flags: str) -> WorkerSettings:
    return parse(WorkerSettings, [*flags, "model"])


def test_hosts_have_their_ranks_in_order() -> None:
    flags = ("--tensor-parallel-size=4", "--pipeline-parallel-size=2", "--nodes=2")
    assert local_ranks(settings(*flags)) == range(4)
    assert local_ranks(settings(*flags, "--node-rank=1")) == range(4, 8)
    assert topology_of(settings(*flags, "--node-rank=1", "--local-rank=2")) == Topology(4, 2, 6)
    assert [speaker(settings(*flags, f"--node-rank={node}")) for node in range(2)] == [0, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-parallel-size=3", "--nodes=2"), "3 x 1 ranks cannot be divided among them evenly"),
        (("--tensor-parallel-size=2", "--nodes=2", "--node-rank=2"), "there are 2 hosts, counted from 0"),
    ],
)
def test_hosts_that_do_not_fit(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        local_ranks(settings(*flags))
