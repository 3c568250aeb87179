"""The model's tokenizer, read for grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet_core.grammar.matchers import make_tokenizer
from tercet_core.grammar.numbers import NumberLimit
from tercet_shared.checkpoint import Checkpoint
from tercet_shared.errors import CheckpointError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary.

    Attributes:
        text: the tokenizer, as the ``tokenizers`` library serializes it.
        size: tokens that the model knows.
        end_ids: the model's end-of-sequence ids, at least one.
        tokenizer: the vocabulary as llguidance needs it.
        numbers: how long numbers in JSON become.
    """

    text: str
    size: int
    end_ids: tuple[int, ...]
    tokenizer: LLTokenizer
    numbers: NumberLimit


def read_vocabulary(model: str, revision: str | None, *, size: int, fingerprint: str) -> Vocabulary:
    """Reads a checkpoint's tokenizer; takes long.

    Args:
        model: directory, file or hub id, as the worker was given it.
        revision: branch, tag or commit of a hub model.
        size: tokens that the worker knows.
        fingerprint: of the worker's tokenizer.

    Raises:
        CheckpointError: it cannot be read, or is not the worker's.
    """
    checkpoint = Checkpoint.open(model, revision=revision, text_only=True)
    if checkpoint.tokenizer.fingerprint != fingerprint:
        raise CheckpointError("The tokenizer is not the one that the worker has.")
    end_ids = tuple(token for token in checkpoint.eos_token_ids if token < size)
    if not end_ids:
        raise CheckpointError("The model has no end-of-sequence token.")
    text = checkpoint.tokenizer.backend.to_str()
    try:
        tokenizer = make_tokenizer(text, size, end_ids)
        return Vocabulary(text, size, end_ids, tokenizer, NumberLimit(tokenizer))
    except ValueError as error:
        raise CheckpointError(f"The tokenizer cannot be used for grammars: {error}.") from None
