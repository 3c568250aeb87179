"""The tokenizer of a checkpoint: text to ids and back, without Transformers."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as Backend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import AddedToken

_PROBE = (
    "Tercet, three lines: a-b_c d'you I'LL  x\t\n\n  def f(n):\r\n    return n**2  # 3.14159 1234567 ½ \u00a0"
    "café cafe\u0301 naïve Straße Привет, мир! 你好世界。 こんにちは 한국어 العربية हिन्दी 🙂🇫🇷 "
    "👩\u200d👩\u200d👧 \u200b\ufeff\x00\x7f"
)
"""Text whose ids stand for merges, pre-tokenizer and normalizer in the fingerprint."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The named tokens of a tokenizer; None where it has none.

    Attributes:
        bos, eos, unk, pad: As text, for the chat template.
        bos_id, eos_id: As ids.
    """

    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None

    def template_variables(self) -> dict[str, str]:
        """Returns what a chat template sees: ``bos_token``, ``eos_token`` …, those that there are."""
        named = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unk, "pad_token": self.pad}
        return {name: text for name, text in named.items() if text is not None}


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes. Immutable; all methods may be called from several threads at once.

    Attributes:
        backend: The ``tokenizers`` object underneath, for incremental decoding. Its settings must not be changed.
        special: The named tokens.
        added_tokens: Tokens matched in text before anything else, by id.
    """

    backend: Backend
    special: SpecialTokens
    added_tokens: Mapping[int, AddedToken] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "added_tokens", self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; the model's may be larger (padded)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out: control tokens, not words."""
        return frozenset(token for token, added in self.added_tokens.items() if added.special)

    @functools.cached_property
    def _plain_backend(self) -> Backend:
        # The switch is a property of the backend, so a second one is kept instead of flipping it under other threads.
        plain = Backend.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Returns the ids of ``text``.

        Args:
            text: Any string; lone surrogates become U+FFFD, since they are no text.
            add_special_tokens: Adds what the tokenizer adds around a text, e.g. a BOS. False for a rendered chat
                template, which writes them itself.
            allow_special: Special tokens spelled out in the text become their ids; False encodes their characters.
        """
        backend = self.backend if allow_special else self._plain_backend
        try:
            # As a batch of one: this call lets other threads run meanwhile, and computes no offsets.
            encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError):
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoding = backend.encode_batch_fast([clean], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Returns the token as the vocabulary spells it (byte-level alphabet, ``▁`` …), or None for an unknown id."""
        return self.backend.id_to_token(token_id)

    @functools.cached_property
    def fingerprint(self) -> str:
        """128 bits in hexadecimal that two tokenizers share only if they give the same ids.

        Over vocabulary, added tokens, named tokens and the ids of a probe text, not over a serialization, so that
        services with different versions of ``tokenizers`` agree.
        """
        vocabulary = sorted(
            (token_id, token) for token, token_id in self.backend.get_vocab(with_added_tokens=True).items()
        )
        added = sorted((token_id, token.content, token.special) for token_id, token in self.added_tokens.items())
        named = [self.special.bos_id, self.special.eos_id]
        probe = [self.encode(_PROBE), self.encode(_PROBE, add_special_tokens=False)]
        canonical = json.dumps([vocabulary, added, named, probe], ensure_ascii=True, separators=(",", ":"))
        return blake2b(canonical.encode("ascii"), digest_size=16).hexdigest()
