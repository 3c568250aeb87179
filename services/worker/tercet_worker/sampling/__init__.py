"""From logits to tokens: `Sampler`, its random numbers, and the columns of parameters that it reads."""

from tercet_worker.sampling.changes import GrammarSource
from tercet_worker.sampling.params import SamplingBatch, SamplingTable
from tercet_worker.sampling.sampler import Sampled, Sampler, SamplerParts

__all__ = ["GrammarSource", "Sampled", "Sampler", "SamplerParts", "SamplingBatch", "SamplingTable"]
