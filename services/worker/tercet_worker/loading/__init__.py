"""From a checkpoint on disk to a model in memory."""

from tercet_worker.loading.memory import available_memory, check_fits
from tercet_worker.loading.weights import load_model

__all__ = ["available_memory", "check_fits", "load_model"]
