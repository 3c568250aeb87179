"""How the tokens of one choice are drawn and when it ends: the type that front end, core and worker share.

The order of the steps is fixed in one place, `tercet_worker.sampling`. Ranges are checked here, once, so that the front
end can answer 400 and the core can refuse a front end that did not check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tercet_shared.errors import InvalidRequestError

MAX_STOP_TOKEN_IDS = 64
"""Stop and end-of-sequence ids together that one request may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one choice.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it. In [0, 100].
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it. In (0, 1].
        min_p: keep tokens whose probability is at least this share of the most likely one's. In [0, 1].
        seed: the choice's own 64-bit seed (already mixed with the choice's index).
        max_tokens: output tokens at most, counted from the original prompt. At least 1.
        min_tokens: output tokens before which neither end-of-sequence nor a stop token may be drawn.
        stop_token_ids: drawing one of these ends the choice; the token stays out of the text.
        eos_token_ids: the model's end-of-sequence ids; empty with ``ignore_eos``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def check(self, *, vocab_size: int) -> None:
        """Raises `InvalidRequestError`, naming the parameter, unless every value is in its range."""
        _range("temperature", self.temperature, 0.0, 100.0)
        _range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0.", param="top_p")
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("top_k", self.top_k, 0, 2**31 - 1)
        _range("seed", self.seed, 0, 2**64 - 1)
        _range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if len(self.stop_token_ids) + len(self.eos_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"At most {MAX_STOP_TOKEN_IDS} stop token ids are allowed.", param="stop_token_ids"
            )
        for ids in (self.stop_token_ids, self.eos_token_ids):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequestError(
                        f"stop_token_ids: {token} is not an id of the vocabulary (0 to {vocab_size - 1}).",
                        param="stop_token_ids",
                    )


def _range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}.", param=name)


def mix_seed(seed: int, choice: int) -> int:
    """Returns the 64-bit seed of one choice: SplitMix64 of the request's seed, advanced by the choice's index.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    mask = 2**64 - 1
    z = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
