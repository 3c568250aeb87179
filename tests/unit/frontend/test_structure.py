"""What a body holds is told without parsing it, and exactly."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_frontend.api import structure
from tercet_frontend.api.structure import (
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_VALUES,
    UNCHECKED_BYTES,
    Structure,
    check_structure,
    structure_of,
)
from tercet_shared.errors import InvalidRequestError

_TEXT = st.text(st.sampled_from('ab"\\[]{},: \né\U0001f600'), max_size=12)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=25,
)


def counted(value: Any) -> Structure:
    """The same, by walking over the parsed value."""
    children = [] if not isinstance(value, (dict, list)) else list(value.values() if isinstance(value, dict) else value)
    own = Structure(
        containers=int(isinstance(value, (dict, list))),
        keys=len(children) if isinstance(value, dict) else 0,
        values=max(len(children) - 1, 0),
    )
    parts = [own, *map(counted, children)]
    return Structure(*(sum(column) for column in zip(*parts, strict=True)))


@settings(deadline=None)
@given(_VALUES, st.booleans(), st.sampled_from([None, 2]), st.integers(1, 40))
def test_it_counts_what_a_parser_makes(value: Any, ascii_only: bool, indent: int | None, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_PIECE", piece)
        assert structure_of(text.encode()) == counted(value)


@settings(deadline=None)
@given(st.text(st.sampled_from('"\\[],:{}a'), max_size=30))
def test_any_text_is_counted(text: str) -> None:
    found = structure_of(text.encode())
    assert all(0 <= count <= len(text) for count in found)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", "lists and objects"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(MAX_KEYS + 1)) + b"}", "keys"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "values"),
    ],
)
def test_too_much_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        check_structure(body)


def test_text_is_not_limited() -> None:
    body = orjson.dumps({"content": '[{"a": 1}, [[[,,,' * 200_000})
    assert len(body) > UNCHECKED_BYTES
    check_structure(body)
    assert structure_of(body) == Structure(containers=1, keys=1, values=0)


def test_small_bodies_are_let_through() -> None:
    check_structure(b"[" * UNCHECKED_BYTES)


def test_many_characters_of_every_kind() -> None:
    many = 600_000  # more than is read at a time
    for text in ('\\"' * many, "\\" * many, '"' * many, '\\\\"[' * many):
        assert structure_of(json.dumps({"a": [text, text]}).encode()) == Structure(containers=2, keys=1, values=1)
