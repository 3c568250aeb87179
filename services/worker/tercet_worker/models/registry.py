"""Architecture name to model class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_shared.errors import CheckpointError, bounded
from tercet_worker.models.llama import LlamaForCausalLM
from tercet_worker.parallel.topology import SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tercet_shared.checkpoint import ModelConfig
    from tercet_worker.layers.parameters import Placement
    from tercet_worker.models.interface import CausalLM
    from tercet_worker.parallel.topology import Share

_FAMILIES: Mapping[str, Callable[[ModelConfig, Placement, Share], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def check_architecture(architecture: str) -> None:
    """Raises `CheckpointError`, naming those that exist, unless the architecture is known."""
    if architecture not in _FAMILIES:
        raise CheckpointError(
            f"The architecture {bounded(architecture, 100)} is not supported (supported: {', '.join(_FAMILIES)})."
        )


def create_model(config: ModelConfig, place: Placement, share: Share | None = None) -> CausalLM:
    """Returns the model, or a share of it, with memory for its weights, which are not loaded yet.

    Raises:
        CheckpointError: the architecture is not known, or a hyper-parameter has a value that its family does not
            support.
    """
    check_architecture(config.architecture)
    return _FAMILIES[config.architecture](config, place, SINGLE.share(config) if share is None else share)
