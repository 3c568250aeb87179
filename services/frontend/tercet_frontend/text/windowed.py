"""Incremental decoding for tokenizers whose text is not a concatenation of bytes per token (WordPiece, Metaspace, …).

The tokenizer's own decoder is asked for a short window of ids twice, with and without the newest; the difference is
the new text. The ids before them give the context on which spaces at the border depend. The window is bounded, so the
cost per token is constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tercet_frontend.text.spans import Spelled

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tokenizers import Tokenizer


class WindowedDecoder:
    """See the module.

    Args:
        tokenizer: read only.
        context: the last ids of the prompt that have text, `CONTEXT` at most.
        hidden: tokens that are left out of the text.
    """

    CONTEXT: ClassVar[int] = 6
    """Ids before the new ones that the tokenizer is shown."""

    MOST_HELD: ClassVar[int] = 8
    """Ids whose text may end in U+FFFD before it is given out so: more than the bytes of any code point."""

    __slots__ = ("_context", "_held", "_hidden", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, hidden: Container[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(context)
        self._held: list[int] = []
        self._hidden = hidden

    def push(self, token: int) -> str:
        """Returns the text that ``token`` completes."""
        if token in self._hidden:
            return ""
        self._held.append(token)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < self.MOST_HELD:
            return ""
        return self._give(text)

    def spell(self, token: int) -> Spelled:
        """Does what `push` does, and says which bytes the token brought: those of the text that it completed."""
        text = self.push(token)
        return Spelled(text, text.encode(), b"", len(self._held), replaces=False)

    def flush(self) -> str:
        """Returns the text of what is held back."""
        return self._give(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        if after.startswith(before):
            return after[len(before) :]
        common = next((at for at, (a, b) in enumerate(zip(after, before, strict=False)) if a != b), len(after))
        return after[common:]

    def _give(self, text: str) -> str:
        if text or len(self._held) >= self.MOST_HELD:
            self._context = (self._context + self._held)[-self.CONTEXT :]
            self._held = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
