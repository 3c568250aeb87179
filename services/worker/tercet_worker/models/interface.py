"""What the runner needs of a model, and what a model needs of attention.

Legend: T tokens of the step (all requests one after another), H hidden size, R rows that need logits, V vocabulary,
Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from tercet_worker.layers.destination import Destination
    from tercet_worker.models.ops import HeadOps, Ops

V = TypeVar("V")


class LayerAttention(Protocol):
    """Attention of the planned step over the KV cache of every layer; `AttentionBackend` is one."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Writes keys and values of the step's tokens to the cache of ``layer`` and attends to all of each request's.

        Args:
            layer: 0-based.
            q: ``[T, Hq, D]``, rotated; tokens may be apart (a part of a merged projection).
            k: ``[T, Hkv, D]``, rotated, likewise.
            v: ``[T, Hkv, D]``, likewise.
            out: ``[T, Hq, D]``; overwritten.
        """


class CausalLM(Protocol):
    """A decoder-only language model, or what one rank of several holds of it: its weights, and its step as operations.

    A rank may hold some of the layers (a stage of the pipeline), and a share of every matrix in them.
    """

    def destinations(self) -> dict[str, Destination]:
        """Returns where the tensors of a checkpoint go, by Hugging Face name. All of them must come."""

    def ignores(self, name: str) -> bool:
        """Says whether a tensor that has no destination may be left out silently."""

    def hidden(self, ops: Ops[V]) -> V:
        """Returns hidden states ``[T, H]`` after the last norm; of a stage before the last, the residual stream."""

    def logits(self, ops: HeadOps[V], hidden: V) -> V:
        """Returns float32 logits ``[R, V]`` for hidden states ``[R, H]``."""


class StepModel(Protocol):
    """A model that can be run, one step at a time."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """Returns hidden states ``[T, H]``, for int32 ids ``[T]`` at int64 ``positions [T]``.

        They are gone with the next call. In a stage before the last one it is the residual stream, which was handed on.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits ``[R, V]`` for hidden states ``[R, H]``; the caller may write to them."""
