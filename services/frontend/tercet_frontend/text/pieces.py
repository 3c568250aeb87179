"""What each token id contributes to the text, as bytes, where the tokenizer's decoder allows to say so.

That is so for the two kinds that nearly all language models use:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token's characters stand for bytes;
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): a token is text with ``▁`` for a space, or one byte
  ``<0x0A>``; some of them drop a space at the very beginning of the text.

The text is then the UTF-8 decoding of the concatenated bytes; ill-formed bytes become U+FFFD, one for each maximal
ill-formed part (Unicode 16, section 3.9, table 3-8), as `bytes.decode` does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a token's string becomes bytes.

    Attributes:
        byte_level: its characters stand for bytes.
        replacements: (from, to) strings, applied in this order; not for byte-level tokens.
        byte_fallback: ``<0xNN>`` is a byte.
        strip: the character that is dropped at the beginning of the whole text, and how many of it at most.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)

    def piece(self, token: str) -> bytes:
        """Returns the bytes of a token, before anything is dropped at the beginning."""
        if self.byte_level:
            # A token with any character outside of the alphabet (an added token) stands for itself.
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:
                return token.encode("utf-8", "replace")
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes.fromhex(byte[1]) if byte is not None else token.encode("utf-8", "replace")


def piece_rules(tokenizer: Tokenizer) -> PieceRules | None:
    """Returns the rules of ``tokenizer``'s decoder, or None when its text is not a concatenation of bytes per token."""
    decoder = tokenizer.decoder
    if decoder is None:
        return None
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    return _sentencepiece(steps) if "Fuse" in kinds else None


def _sentencepiece(steps: list[dict[str, Any]]) -> PieceRules | None:
    """Returns the rules for Replace*, ByteFallback?, Fuse, Strip? in this order; None for any other sequence."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    strip = ("", 0)
    rank = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    order = [rank.get(step["type"], -1) for step in steps]
    if min(order) < 0 or order != sorted(order) or any(order.count(once) > 1 for once in (1, 2, 3)):
        return None
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            old = step["pattern"].get("String")
            if not old:
                return None
            replacements.append((old, step["content"]))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Strip":
            if step["stop"]:
                return None
            strip = (step["content"], step["start"])
    return PieceRules(byte_level=False, replacements=tuple(replacements), byte_fallback=byte_fallback, strip=strip)


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's character for each byte, inverted: printable Latin-1 stands for itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
