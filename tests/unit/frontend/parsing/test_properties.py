"""What holds for any text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS
from tercet_frontend.parsing.sink import FUNCTION_NAME
from tests.unit.frontend.parsing.support import OFFERED, Message, parser, plan, read, whole

FRAGMENTS = [
    *{marker for form in TOOL_FORMATS.values() for marker in form.markers},
    *{tag for form in REASONING_FORMATS.values() for tag in form.markers},
    '{"name": "f", "arguments": ', '{"name":"unknown","parameters":',
    '{"arguments": {"a": "}"}, "name": "get_weather"}',
    '{"name": "f", "arguments": {"a": [1, {"b": "\\"</tool_call>"}]}}', '"{\\"x\\": 1}"', "{}", '{"x": "\\', '"name"',
    "[f(a=1, b='x'), ", "f-2()]", "[f(", "get_weather{", '"""', "'", "\\", '"', "{", "}", "[", "]", "(", ")", ",", ";",
    ":", "=", " ", "\n", "```json\n", "```", "function", "f", "get_weather", "<", "<tool", "[TOOL", "text", "é🙂",
    "None", "1.5", "-", "</",
]  # fmt: skip

texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join),
    st.text(alphabet='<>[]{}"\\tolcafn:, ', max_size=60),
)
plans = st.builds(
    plan,
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, *REASONING_FORMATS]),
    opening=st.sampled_from(Opening),
    max_calls=st.sampled_from([None, 1]),
    keep_reasoning=st.booleans(),
    only_calls=st.booleans(),
)


def cut(data: st.DataObject, text: str) -> list[str]:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]


@settings(max_examples=600, deadline=None)
@given(plans, texts, st.data())
def test_the_events_do_not_depend_on_the_cuts(chosen: Any, text: str, data: st.DataObject) -> None:
    expected = whole(chosen, text)
    assert read(chosen, text) == expected  # character by character
    assert read(chosen, cut(data, text)) == expected


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(TOOL_FORMATS)), texts)
def test_nothing_is_lost(form: str, text: str) -> None:
    found = whole(plan(form), text)
    if not found.calls:
        assert found.content == text
    for name, arguments in found.calls:
        assert FUNCTION_NAME.fullmatch(name)
        if form != "pythonic" and arguments != "{}" and "\\" not in text:
            assert arguments in text
        if not TOOL_FORMATS[form].markers:
            assert name in OFFERED


@settings(max_examples=300, deadline=None)
@given(plans, texts)
def test_little_is_buffered(chosen: Any, text: str) -> None:
    reader = parser(chosen)
    for char in text:
        reader.push(char)
        assert len(reader._reader._text) - reader._reader._at < 40


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
calls = st.lists(
    st.tuples(st.sampled_from(sorted(OFFERED)), st.dictionaries(identifiers, values, max_size=3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(TOOL_FORMATS)), calls, st.booleans(), st.data())
def test_what_is_written_is_read(form: str, made: list[Any], escaped: bool, data: st.DataObject) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=escaped)) for name, arguments in made]
    text = TOOL_FORMATS[form].written(written)
    found = read(plan(form), cut(data, text))
    assert found.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == made
    if form != "pythonic":
        assert found.calls == written


REPEATED = ["<", '{"', '"\\', '{"name": "f", "arguments": {"a": "', "[TOOL_CALLS]", "<tool_call>", "[f(a='\\'", " \n",
            '{"arguments": {"a": [', "<think>", "</thin"]  # fmt: skip


@pytest.mark.parametrize("form", [None, *TOOL_FORMATS])
@pytest.mark.parametrize("piece", REPEATED)
def test_time_is_linear_in_the_text(form: str | None, piece: str) -> None:
    # If it were quadratic, this would take many minutes.
    text = piece * (30_000 // len(piece))
    for pieces in (text, [text]):
        message = Message()
        reader = parser(plan(form, "think"))
        for part in pieces:
            message.add(reader.push(part))
        message.add(reader.finish(stopped=False))
