from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from tercet_frontend.text import TextStream

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + at) for at, byte in enumerate(_OTHERS)}


def byte_ids(raw: bytes | str) -> list[int]:
    """Ids of the tokenizer `byte_level` for these bytes, one each."""
    data = raw.encode() if isinstance(raw, str) else raw
    return [_ALPHABET.index(_CHAR_OF[byte]) for byte in data]


def run(stream: TextStream, groups: Sequence[Sequence[int]]) -> tuple[str, str | None, int, list[str]]:
    """Pushes the groups and the end; returns text, stop string, tokens used, and the pieces."""
    pieces = []
    for group in groups:
        delta = stream.push(list(group))
        pieces.append(delta.text)
        if delta.stopped_by is not None:
            return "".join(pieces), delta.stopped_by, delta.output_tokens, pieces
    delta = stream.push([], finished=True)
    pieces.append(delta.text)
    return "".join(pieces), delta.stopped_by, delta.output_tokens, pieces


@st.composite
def groupings(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    """Cuts ``ids`` into runs, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    bounds = [0, *cuts, len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(bounds)]


def some_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Runs of ids: any, special ones, real text, and its fragments."""
    size = tokenizer.get_vocab_size()
    texts = st.text(st.sampled_from("ab é世🙂🇫🇷\u200d\n▁ "), max_size=8)
    encoded = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    fragments = st.tuples(encoded, st.integers(0, 3), st.integers(0, 3)).map(
        lambda cut: cut[0][cut[1] : max(len(cut[0]) - cut[2], 0)]
    )
    piece: Any = st.one_of(st.lists(st.integers(0, size - 1), max_size=6), encoded, fragments)
    return st.lists(piece, max_size=6).map(lambda runs: [token for run_ids in runs for token in run_ids])
