"""Special tokens that a parser must see have text; the others stay out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tercet_frontend.text import Detokenizer, TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@pytest.mark.parametrize(
    ("name", "shown", "other", "word"),
    [("smol", 1, 2, 19556), ("byte_level", 256, None, 40), ("sentencepiece", 1, 2, 263), ("wordpiece", 1, None, 2)],
)
def test_shown_tokens(name: str, shown: int, other: int | None, word: int, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    plain = Detokenizer(tokenizer)
    showing = plain.showing(frozenset({shown}))
    assert plain.showing(frozenset({shown})) is showing
    assert plain.showing(frozenset()) is plain
    assert plain.showing(frozenset({word})) is plain  # has text anyway
    ids = [word, shown, *([] if other is None else [other]), word]
    marker = tokenizer.id_to_token(shown)
    assert marker not in TextStream(plain, ()).push(ids, finished=True).text
    assert marker in TextStream(plain, (), skip_special_tokens=False).push(ids, finished=True).text
    text = TextStream(showing, ()).push(ids, finished=True).text
    assert text.count(marker) == 1
    if other is not None:
        assert tokenizer.id_to_token(other) not in text
    assert marker not in TextStream(plain, ()).push(ids, finished=True).text
