from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tercet_frontend.text import Detokenizer, StopStrings, TextStream
from tests.unit.frontend.text.support import byte_ids, groupings, run, some_ids

STOPS = st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=5), min_size=1, max_size=5)


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None, int]:
    """Text, stop string and end of the first complete stop string, by trying every end."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab🙂"), max_size=40), stops=STOPS, data=st.data())
def test_cut_at_the_first_complete_one(
    bytes_only: Detokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = byte_ids(text)
    groups = data.draw(groupings(ids))
    before, stop, end = expected(text, stops)
    joined, stopped_by, tokens, _ = run(TextStream(bytes_only, [], stop=stops), groups)
    assert (joined, stopped_by) == (before, stop)
    assert tokens == len(text[:end].encode())


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab🙂"), max_size=40), stops=STOPS)
def test_nothing_is_held_that_cannot_become_a_stop_string(bytes_only: Detokenizer, text: str, stops: list[str]) -> None:
    """After every token exactly the longest end that begins a stop string is held back, and no more."""
    stream = TextStream(bytes_only, [], stop=stops)
    given_out = ""
    for position, char in enumerate(text, 1):
        delta = stream.push(byte_ids(char))
        given_out += delta.text
        if delta.stopped_by is not None:
            return
        seen = text[:position]
        held = max(
            length for length in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - length :]) for s in stops)
        )
        assert given_out == seen[: len(seen) - held]


@settings(deadline=None)
@given(data=st.data())
def test_no_part_of_a_stop_string_leaks(smol: Tokenizer, data: st.DataObject) -> None:
    """Real tokens: however they are grouped, the pieces end where the whole text has its first stop string."""
    decode = Detokenizer(smol)
    ids = data.draw(some_ids(smol))
    whole = smol.decode(ids)
    at = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stops = [stop for stop in (whole[at : at + 3], "🙂🇫", "\ufffd\ufffd") if stop]
    before, stop, _ = expected(whole, stops)
    single = run(TextStream(decode, [], stop=stops), [[token] for token in ids])
    assert single[:2] == (before, stop)
    assert run(TextStream(decode, [], stop=stops), data.draw(groupings(ids)))[:3] == single[:3]


def test_longest_of_those_that_end_together(bytes_only: Detokenizer) -> None:
    assert run(TextStream(bytes_only, [], stop=("b", "ab")), [byte_ids("xab")])[:3] == ("x", "ab", 3)


def test_the_one_that_is_complete_first(bytes_only: Detokenizer) -> None:
    assert run(TextStream(bytes_only, [], stop=("abcd", "bc")), [byte_ids("xabcd")])[:3] == ("xa", "bc", 4)


def test_held_text_comes_when_it_can_be_no_stop_string(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [], stop=("\n\nUser:",))
    assert stream.push(byte_ids("hi\n\nUs")).text == "hi"
    assert stream.push(byte_ids("a")).text == "\n\nUsa"


def test_held_text_comes_at_the_end(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [], stop=("STOP",))
    delta = stream.push(byte_ids("xST") + byte_ids("!"), finished=True, drop_last=True)
    assert (delta.text, delta.stopped_by, delta.output_tokens) == ("xST", None, 4)


def test_a_stop_string_before_the_end_of_sequence_wins(bytes_only: Detokenizer) -> None:
    delta = TextStream(bytes_only, [], stop=("b",)).push([*byte_ids("ab"), 256], finished=True, drop_last=True)
    assert (delta.text, delta.stopped_by, delta.output_tokens) == ("a", "b", 2)


def test_held_bytes_at_the_end_can_complete_one(bytes_only: Detokenizer) -> None:
    delta = TextStream(bytes_only, [], stop=("\ufffd",)).push(byte_ids(b"a\xf0"), finished=True)
    assert (delta.text, delta.stopped_by) == ("a", "\ufffd")


def test_the_stop_string_can_be_included(bytes_only: Detokenizer) -> None:
    delta = TextStream(bytes_only, [], stop=("cd",), include_stop=True).push(byte_ids("abcdef"))
    assert (delta.text, delta.output_tokens) == ("abcd", 4)


def test_the_first_tokens_are_not_searched(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [], stop=("b",), min_tokens=3)
    assert run(stream, [byte_ids("abbab")])[:3] == ("abba", "b", 5)
    short = TextStream(bytes_only, [], stop=("\ufffd",), min_tokens=3)
    assert run(short, [byte_ids(b"ab\xf0")])[:3] == ("ab\ufffd", None, 3)


def test_characters_that_mean_something_in_patterns(bytes_only: Detokenizer) -> None:
    for stop in ("]", "^", "-", "\\", "[a-z]", "^a"):
        assert run(TextStream(bytes_only, [], stop=(stop,)), [byte_ids(f"xyz{stop}q")])[:2] == ("xyz", stop)


def test_compiled_once_for_several_choices(bytes_only: Detokenizer) -> None:
    stops = StopStrings(["\n"])
    for text in ("a\n", "b\n"):
        assert run(TextStream(bytes_only, [], stop=stops), [byte_ids(text)])[:2] == (text[0], "\n")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
