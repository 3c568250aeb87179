"""Streams are read alike however they are cut into pieces; only whole ones give samples."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_tools.bench.answers import EventStream, Sample
from tercet_tools.bench.http import RequestFailedError
from tests.fakes.openai_server import DONE, tokens


def stream(events: tuple[str, ...], end: str = "\n\n") -> bytes:
    return "".join(f"data: {event}{end}" for event in events).encode()


def read(pieces: list[bytes], *, status: int = 200, wanted: int = 5) -> Sample:
    """Reads pieces that come a second apart, the first one second after the start."""
    answer = EventStream(start=100.0, wanted=wanted)
    answer.head(status)
    for number, piece in enumerate(pieces, 1):
        answer.body(piece, 100.0 + number)
    answer.end()
    return answer.sample()


def test_times_are_those_of_events_with_content() -> None:
    events = [stream((event,)) for event in tokens(3, chat=True)]  # role, three tokens, finish, usage, done
    sample = read(events)
    assert (sample.first, sample.last, sample.total) == (2.0, 4.0, 7.0)
    assert sample.gaps == [1.0, 1.0]
    assert (sample.output_tokens, sample.events, sample.tpot) == (3, 3, 1.0)
    assert (sample.input_tokens, sample.counted) == (3, True)


@settings(deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_pieces_may_end_anywhere(data: st.DataObject, chat: bool, end: str) -> None:
    raw = b": comment" + end.encode() + stream(tokens(5, chat=chat, cached=2), end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    sample = read(pieces)
    assert (sample.output_tokens, sample.events, sample.input_tokens, sample.cached_tokens) == (5, 5, 3, 2)


def test_several_tokens_in_one_event_are_counted_by_usage() -> None:
    events = ('{"choices": [{"text": "ab"}]}', '{"choices": [], "usage": {"completion_tokens": 4}}', DONE)
    sample = read([stream(events)])
    assert (sample.output_tokens, sample.events) == (4, 1)


def test_without_usage_events_are_counted() -> None:
    sample = read([stream(tokens(4, usage=False))])
    assert (sample.output_tokens, sample.counted, sample.input_tokens) == (4, False, None)


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_content(member: str) -> None:
    event = json.dumps({"choices": [{"delta": {member: "x"}}]})
    assert read([stream((event, DONE))]).events == 1


@pytest.mark.parametrize(
    ("raw", "status", "kind", "said"),
    [
        (stream(tokens(3)[:-1]), 200, "cut", "DONE"),
        (stream((DONE,)), 200, "empty", "content"),
        (stream(("{",)), 200, "not JSON", "JSON"),
        (stream(("3",)), 200, "not JSON", "JSON"),
        (stream(('{"error": {"message": "gone"}}', DONE)), 200, "error event", "gone"),
        (b'{"error": {"message": "slow down"}}', 429, "HTTP 429", "slow down"),
        (b"<html>", 502, "HTTP 502", "<html>"),
        (b"", 500, "HTTP 500", "no text"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(raw: bytes, status: int, kind: str, said: str) -> None:
    with pytest.raises(RequestFailedError, match=said) as caught:
        read([raw], status=status)
    assert caught.value.kind == kind


def test_members_of_other_types_than_they_should_have_are_ignored() -> None:
    odd = ('{"choices": [3, {"delta": "x"}, {"delta": null}], "usage": 7}',)
    last = '{"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens_details": 4}}'
    sample = read([stream((*odd, '{"choices": [{"text": "x"}]}', last, DONE))])
    assert (sample.events, sample.output_tokens, sample.cached_tokens) == (1, 1, 0)


def test_the_last_line_may_lack_its_end() -> None:
    assert read([stream(tokens(2)).rstrip()]).output_tokens == 2
