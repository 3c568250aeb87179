"""Compiling a translated grammar within limits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tercet_core.grammar.translate import refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_shared.structured import Grammar

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms: what one mask may cost
    step_max_items=10_000,  # up to 20 µs each
    max_lexer_states=10_000,  # 1 to 2 KB each, for every request that uses the grammar
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""What a grammar may cost. A mask that exceeds them ends its request; a request must not make the others wait."""
FIRST_STEP_SECONDS: Final = 0.25
"""Processor time that the first mask may take: a grammar that exceeds it would hold up the steps of everybody."""


def make_tokenizer(text: str, vocab_size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """Returns the vocabulary as llguidance needs it. Takes long. Raises `ValueError` when the two do not fit.

    Args:
        text: the tokenizer, as the ``tokenizers`` library serializes it.
        vocab_size: tokens that the model knows.
        end_ids: the model's end-of-sequence ids, at least one.
    """
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_ids))


def make_matcher(tokenizer: LLTokenizer, grammar: Grammar, translated: str) -> LLMatcher:
    """Returns a matcher at the start of its grammar. Takes long. Raises `InvalidRequestError`."""
    matcher = LLMatcher(tokenizer, translated, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refused(grammar, matcher.get_error())
    return matcher


def try_out(tokenizer: LLTokenizer, grammar: Grammar, translated: str) -> None:
    """Compiles a grammar and takes the first step. Raises `InvalidRequestError` when it cannot be followed."""
    matcher = make_matcher(tokenizer, grammar, translated).deep_copy()
    words = allocate_token_bitmask(1, tokenizer.vocab_size)
    begin = time.thread_time()
    fill_next_token_bitmask(matcher, words)
    matcher.compute_ff_tokens()
    if time.thread_time() - begin > FIRST_STEP_SECONDS:
        raise refused(grammar, "it is too complex.")
    if matcher.is_error():
        raise refused(grammar, _explained(matcher.get_error()))
    if not np.any(words):
        raise refused(grammar, "it allows no token.")


def _explained(error: str) -> str:
    return "no text satisfies it." if error.startswith("NoExtension") else error
