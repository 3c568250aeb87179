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
MAX_LOGIT_BIAS = 1_024
"""Tokens whose logit one request may shift."""
MAX_ALLOWED_TOKEN_IDS = 16_384
"""Tokens to which one request may restrict itself."""
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 64
"""Token sequences that one request may exclude, and tokens of each."""
MAX_LOGPROBS = 20
"""Alternatives for which one request may see log-probabilities, per token."""
OFF = -1
"""For `SamplingParams.logprobs` and `SamplingParams.prompt_logprobs`: none are asked for."""


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
        presence_penalty: taken from the logit of every token that is in the output. In [-2, 2].
        frequency_penalty: taken from a token's logit once for each time that it is in the output. In [-2, 2].
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, else multiplied.
            Above 0, at most 100; 1 changes nothing.
        logit_bias: (id, what is added to its logit), at most `MAX_LOGIT_BIAS`, each id once. Values in [-100, 100].
        allowed_token_ids: no other token may be drawn; empty allows all. At most `MAX_ALLOWED_TOKEN_IDS`. The stop and
            end-of-sequence ids are not added to them.
        bad_words: sequences of tokens that may not come about in the output, at most `MAX_BAD_WORDS`.
        logprobs: how many alternatives per output token to report log-probabilities of, beside the token's own; `OFF`
            reports nothing.
        prompt_logprobs: the same for the tokens of the prompt but the first.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int = OFF
    prompt_logprobs: int = OFF

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
            _ids("stop_token_ids", ids, vocab_size)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequestError("repetition_penalty must be above 0.", param="repetition_penalty")
        _range("logprobs", self.logprobs, OFF, MAX_LOGPROBS)
        _range("prompt_logprobs", self.prompt_logprobs, OFF, MAX_LOGPROBS)
        self._check_tokens(vocab_size)

    def _check_tokens(self, vocab_size: int) -> None:
        _count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _ids("logit_bias", tuple(token for token, _ in self.logit_bias), vocab_size)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequestError("logit_bias names a token twice.", param="logit_bias")
        for _, value in self.logit_bias:
            _range("logit_bias", value, -100.0, 100.0)
        _count("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
        _ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _count("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            if not word:
                raise InvalidRequestError("bad_words has an empty entry.", param="bad_words")
            _count("bad_words", len(word), MAX_BAD_WORD_LENGTH)
            _ids("bad_words", word, vocab_size)


def _range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}.", param=name)


def _count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name}: at most {limit} tokens or entries are allowed, not {count}.", param=name)


def _ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{name}: {token} is not an id of the vocabulary (0 to {vocab_size - 1}).", param=name
            )


def mix_seed(seed: int, choice: int) -> int:
    """Returns the 64-bit seed of one choice: SplitMix64 of the request's seed, advanced by the choice's index.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    mask = 2**64 - 1
    z = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
