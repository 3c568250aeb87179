"""Rotary position embedding (Su et al., 2021), in the half-split form that Hugging Face checkpoints are made for.

Element i of a head is rotated together with element i + R/2, where R is the number of rotated dimensions. Angles are
computed in float32 as the reference implementation does (`modeling_rope_utils` of Transformers), so that long
positions round alike.

Legend: T tokens, N heads (of queries and keys together), D head size, R rotated dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tercet_shared.checkpoint import Llama3RopeScaling, RopeConfig, RopeDivisors
from tercet_worker.layers.destination import Destination


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of one step, shared by all layers."""

    cos: torch.Tensor  # float32 [T, 1, R / 2]
    sin: torch.Tensor  # float32 [T, 1, R / 2]


class RotaryEmbedding:
    """Rotates queries and keys by their positions.

    Args:
        config: base, rotated dimensions, scaling.
        device: where the frequencies live; they are float32 whatever the model's dtype is.
    """

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._config = config
        self.half = config.rotary_dim // 2
        self.inverse_frequencies = inverse_frequencies(config).to(device)  # float32 [R / 2], radians per token

    def destinations(self) -> dict[str, Destination]:
        """Returns where the tensor of frequency divisors goes, if the checkpoint has one."""
        scaling = self._config.scaling
        if not isinstance(scaling, RopeDivisors):
            return {}
        frequencies = self.inverse_frequencies

        def store(start: int, rows: torch.Tensor) -> None:
            frequencies[start : start + rows.shape[0]] /= rows.to(frequencies)

        return {scaling.tensor: Destination((self.half,), torch.float32, store)}

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Returns the angles' cosines and sines for ``positions [T]``."""
        angles = positions.to(torch.float32).unsqueeze(1) * self.inverse_frequencies  # [T, R / 2]
        return Rotation(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))

    def rotate_(self, heads: torch.Tensor, rotation: Rotation) -> None:
        """Rotates ``heads [T, N, D]`` in place; products are taken in float32."""
        half = self.half
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated_first = first * rotation.cos - second * rotation.sin
        rotated_second = second * rotation.cos + first * rotation.sin
        first.copy_(rotated_first)
        second.copy_(rotated_second)


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Returns float32 ``[R / 2]`` radians per token, with Llama 3's scaling applied.

    `RopeDivisors` are not applied yet: they come with the weights.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / config.rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    if isinstance(config.scaling, Llama3RopeScaling):
        return _llama3(frequencies, config.scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest = context / scaling.low_freq_factor
    shortest = context / scaling.high_freq_factor
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    slowed = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)
