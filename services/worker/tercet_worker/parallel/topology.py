"""Which part of a model each rank holds. Pure: nothing is started and no torch is imported here.

Ranks are numbered stage by stage: ``rank = stage * tensor + tp_rank``. A stage of the pipeline holds consecutive
layers; the tensor-parallel ranks of a stage hold a share of every matrix of these layers.

* Attention is divided by heads. Each rank has whole groups: some key/value heads and all query heads that read them.
  Where there are fewer key/value heads than ranks, each rank has one of them, and ranks that have the same one divide
  its query heads.
* The inner dimension of the feed-forward part is divided in units of 32, the block of quantized weights, where it can.
* The vocabulary is divided into equal runs; the last ones may be shorter.

What cannot be divided evenly is divided as evenly as it goes, with the larger shares first. In the pipeline that is
right as well: the last stage computes the output head besides its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_shared.errors import ConfigurationError
from tercet_worker.layers.cut import Cut

if TYPE_CHECKING:
    from tercet_shared.checkpoint import ModelConfig

_UNIT = 32
"""Columns that quantized weights share a scale for, at most."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of one model."""

    layers: range
    """Numbers of its layers in the checkpoint."""
    query_heads: Cut
    kv_heads: Cut
    inner: Cut
    """Of the feed-forward part's inner dimension."""
    vocab: Cut
    vocab_rows: int
    """Rows of the vocabulary of the largest share: what every rank's logits are padded to."""
    first: bool = True
    """Whether it embeds tokens; otherwise it receives the residual stream."""
    last: bool = True
    """Whether it computes logits and samples; otherwise it hands the residual stream on."""
    leads: bool = True
    """Whether it adds what must be added once: the residual stream and biases of products that are summed up."""

    @property
    def whole(self) -> bool:
        """Whether that is everything."""
        return self.first and self.last and not self.vocab.partial


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of one rank among all that hold a model together."""

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.pipeline < 1 or not 0 <= self.rank < self.ranks:
            raise ConfigurationError(f"There is no rank {self.rank} among {self.tensor} x {self.pipeline}.")

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """Of the pipeline, from 0."""
        return self.rank // self.tensor

    @property
    def tp_rank(self) -> int:
        """Among the ranks of its stage, from 0."""
        return self.rank % self.tensor

    @property
    def first(self) -> bool:
        """Whether it is in the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it is in the last stage."""
        return self.stage == self.pipeline - 1

    @property
    def answers(self) -> bool:
        """Whether it is the one that sends results to the core."""
        return self.rank == answering(self.tensor, self.pipeline)

    def peer(self, stage: int) -> int:
        """Returns the rank in another stage that this one talks to."""
        return stage * self.tensor + self.tp_rank

    def share(self, config: ModelConfig) -> Share:
        """Returns what this rank holds of a model.

        Raises:
            ConfigurationError: the model cannot be divided among so many ranks.
        """
        if self.pipeline > config.num_layers:
            raise ConfigurationError(
                f"--pipeline-parallel-size {self.pipeline}: the model has only {config.num_layers} layers.",
                param="pipeline_parallel_size",
            )
        smallest = min(config.num_heads, config.intermediate_size, config.vocab_size)
        if self.tensor > smallest:
            what = "query heads" if smallest == config.num_heads else "rows to divide"
            raise ConfigurationError(
                f"--tensor-parallel-size {self.tensor}: the model has only {smallest} {what}.",
                param="tensor_parallel_size",
            )
        query, kv = self._heads(config.num_heads, config.num_kv_heads)
        layers = Cut.even(config.num_layers, self.pipeline, self.stage)
        each = -(-config.vocab_size // self.tensor)
        begin = self.tp_rank * each
        if begin >= config.vocab_size:
            raise ConfigurationError(
                f"--tensor-parallel-size {self.tensor}: a vocabulary of {config.vocab_size} cannot be divided so.",
                param="tensor_parallel_size",
            )
        return Share(
            layers=range(layers.begin, layers.end),
            query_heads=query,
            kv_heads=kv,
            inner=self._inner(config.intermediate_size),
            vocab=Cut(config.vocab_size, begin, min(begin + each, config.vocab_size)),
            vocab_rows=each,
            first=self.first,
            last=self.last,
            leads=self.tp_rank == 0,
        )

    def _heads(self, query: int, kv: int) -> tuple[Cut, Cut]:
        group = query // kv
        if self.tensor <= kv:
            own = Cut.even(kv, self.tensor, self.tp_rank)
            return Cut(query, own.begin * group, own.end * group), own
        # Ranks are divided among the heads as heads would be among ranks.
        for head in range(kv):
            sharing = Cut.even(self.tensor, kv, head)
            if sharing.begin <= self.tp_rank < sharing.end:
                part = Cut.even(group, len(sharing), self.tp_rank - sharing.begin)
                return (
                    Cut(query, head * group + part.begin, head * group + part.end),
                    Cut(kv, head, head + 1),
                )
        raise AssertionError("every rank has a head")

    def _inner(self, size: int) -> Cut:
        unit = _UNIT if size % _UNIT == 0 and size // _UNIT >= self.tensor else 1
        units = Cut.even(size // unit, self.tensor, self.tp_rank)
        return Cut(size, units.begin * unit, units.end * unit)


def answering(tensor: int, pipeline: int) -> int:
    """Returns the rank that sends results to the core: the first one of the last stage."""
    return tensor * (pipeline - 1)


SINGLE = Topology()
"""One rank that holds everything."""
