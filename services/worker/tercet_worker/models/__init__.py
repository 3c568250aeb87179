"""Model families. `create_model` builds one for a configuration; a family is one file and one entry in `registry`."""

from tercet_worker.models.interface import CausalLM, LayerAttention
from tercet_worker.models.registry import create_model

__all__ = ["CausalLM", "LayerAttention", "create_model"]
