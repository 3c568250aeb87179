"""Which token brought which bytes: joined they are the text, in every grouping, cut at every stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tercet_frontend.text import Detokenizer, TextStream
from tests.unit.frontend.text.support import byte_ids, groupings, some_ids


def spans_of(
    stream: TextStream, groups: Sequence[Sequence[int]], *, drop_last: bool = False
) -> tuple[str, list[tuple[bytes, int]], int]:
    """Text, spans and tokens that count; checks after every push what was released."""
    text, spans, delta = "", [], None
    for at, group in enumerate(groups):
        last = at == len(groups) - 1
        delta = stream.push(list(group), finished=last, drop_last=last and drop_last)
        text += delta.text
        spans += delta.spans
        # No more and no less than what was given out: a token comes with its text.
        assert text == b"".join(raw for raw, _ in spans).decode("utf-8", "replace")
        if delta.stopped_by is not None:
            break
    assert delta is not None
    return text, spans, delta.output_tokens


@settings(deadline=None)
@given(data=st.data())
def test_joined_they_are_the_text(detokenizer: tuple[Detokenizer, Tokenizer], data: st.DataObject) -> None:
    decode, tokenizer = detokenizer
    ids, prompt = data.draw(some_ids(tokenizer)), data.draw(some_ids(tokenizer))
    whole = tokenizer.decode(ids)
    at = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = data.draw(st.sampled_from([(), (whole[at : at + 3],), (whole[at : at + 1], "🙂🇫", "\ufffd\ufffd")]))
    options = {
        "stop": [string for string in stop if string],
        "include_stop": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "min_tokens": data.draw(st.integers(0, 4)),
    }
    drop_last = data.draw(st.booleans())
    groups = data.draw(groupings(ids))
    if drop_last:
        groups[-1].append(0)
    text, spans, count = spans_of(TextStream(decode, prompt, spans=True, **options), groups, drop_last=drop_last)
    assert b"".join(raw for raw, _ in spans).decode("utf-8", "replace") == text
    assert len(spans) == count
    before = b""
    for raw, offset in spans:
        # The characters that are complete before it.
        assert offset in (len(codecs.utf_8_decode(before, "replace", False)[0]), len(text))
        before += raw
    plain = TextStream(decode, prompt, **options)
    plain_text = ""
    for index, group in enumerate(groups):
        delta = plain.push(group, finished=index == len(groups) - 1, drop_last=drop_last and index == len(groups) - 1)
        plain_text += delta.text
        if delta.stopped_by is not None:
            break
    assert plain_text == text
    assert plain.output_tokens == count


@settings(deadline=None)
@given(data=st.data())
def test_grouping_does_not_matter(detokenizer: tuple[Detokenizer, Tokenizer], data: st.DataObject) -> None:
    decode, tokenizer = detokenizer
    ids = data.draw(some_ids(tokenizer))
    stop = data.draw(st.sampled_from([(), ("a", "世"), ("\ufffd",)]))
    one = spans_of(TextStream(decode, [], stop=stop, spans=True), [*([token] for token in ids), []])
    assert spans_of(TextStream(decode, [], stop=stop, spans=True), data.draw(groupings(ids))) == one


def test_each_byte_of_a_character_is_its_own_token_s(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [], spans=True)
    delta = stream.push(byte_ids("a🙂")[:3])
    assert (delta.text, delta.spans) == ("a", [(b"a", 0)])
    delta = stream.push([*byte_ids("🙂")[2:], *byte_ids("b")])
    assert delta.text == "🙂b"
    assert delta.spans == [(b"\xf0", 1), (b"\x9f", 1), (b"\x99", 1), (b"\x82", 1), (b"b", 2)]


def test_a_token_that_the_stop_string_cuts(smol: Tokenizer) -> None:
    decode = Detokenizer(smol)
    ids = smol.encode("The capital of France", add_special_tokens=False).ids
    text, spans, count = spans_of(TextStream(decode, [], stop=("pital of F",), spans=True), [ids])
    assert text == "The ca"
    assert [raw for raw, _ in spans] == [b"The", b" ca", b"", b""]
    assert [offset for _, offset in spans] == [0, 3, 6, 6]
    assert count == 4
    text, spans, _ = spans_of(TextStream(decode, [], stop=("pital of F",), include_stop=True, spans=True), [ids])
    assert text == "The capital of F"
    assert [raw for raw, _ in spans] == [b"The", b" capital", b" of", b" F"]


def test_what_is_held_back_for_a_stop_string_brings_its_tokens_later(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [], stop=("bcd",), spans=True)
    assert stream.push(byte_ids("abc")).spans == [(b"a", 0)]
    assert stream.push(byte_ids("a")).spans == [(b"b", 1), (b"c", 2), (b"a", 3)]


def test_a_token_that_is_held_back_in_part_comes_whole(smol: Tokenizer) -> None:
    stream = TextStream(Detokenizer(smol), [], stop=("Paris!",), spans=True)
    is_, paris, dot = smol.encode("is Paris.", add_special_tokens=False).ids
    assert stream.push([is_])[::3] == ("is", [(b"is", 0)])
    assert stream.push([paris])[::3] == ("", []), "the space before it as well"
    assert stream.push([dot])[::3] == (" Paris.", [(b" Paris", 2), (b".", 8)])


def test_a_leading_space_that_is_dropped(sentencepiece: Tokenizer) -> None:
    bos, hello, world = (sentencepiece.token_to_id(name) for name in ("<s>", "▁Hello", "▁world"))
    stream = TextStream(Detokenizer(sentencepiece), [bos], spans=True)
    assert stream.push([hello, world]).spans == [(b"Hello", 0), (b" world", 5)]


def test_a_character_that_the_prompt_began(bytes_only: Detokenizer) -> None:
    prompt, rest = byte_ids("x🙂")[:-2], byte_ids("🙂")[2:]
    delta = TextStream(bytes_only, prompt, spans=True).push([*rest, *byte_ids("y")])
    assert delta.text == "🙂y"
    # The bytes that only the prompt has cannot be told apart by token: the one that completes the character has it.
    assert delta.spans == [(b"", 0), ("🙂".encode(), 0), (b"y", 1)]


def test_tokens_without_text(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [], spans=True)
    assert stream.push([256, *byte_ids("a"), 256, 300]).spans == [(b"", 0), (b"a", 0), (b"", 1), (b"", 1)]
    assert stream.push([256], finished=True, drop_last=True).spans == [(b"", 1)]


def test_a_character_that_the_prompt_began_and_the_output_does_not_complete(bytes_only: Detokenizer) -> None:
    prompt = byte_ids("x🙂")[:-2]
    text, spans, _ = spans_of(TextStream(bytes_only, prompt, spans=True), [byte_ids("🙂")[2:3], byte_ids("y"), []])
    assert (text, spans) == ("y", [(b"", 0), (b"y", 0)])
    text, spans, _ = spans_of(TextStream(bytes_only, prompt, spans=True), [byte_ids("🙂")[2:3], []])
    assert (text, spans) == ("", [(b"", 0)])


def test_text_that_comes_only_at_the_end() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "\ufffd": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    stream = TextStream(Detokenizer(tokenizer), [1], spans=True)
    assert stream.push([1, 2]).spans == [(b" a", 0)]
    delta = stream.push([], finished=True)
    assert (delta.text, delta.spans) == (" \ufffd", [(" \ufffd".encode(), 2)])


@pytest.mark.parametrize("raw", [b"\xff", b"\xf0\x9f", b"\xe4\xb8", b"\x99\x82\xf0\x9f"])
def test_endless_invalid_bytes_release_their_tokens(bytes_only: Detokenizer, raw: bytes) -> None:
    stream = TextStream(bytes_only, [], spans=True)
    released = 0
    for position, token in enumerate(byte_ids(raw) * 1_000, 1):
        released += len(stream.push([token]).spans)
        assert position - 4 <= released <= position


def test_bytes_of_single_tokens(detokenizer: tuple[Detokenizer, Tokenizer]) -> None:
    decode, tokenizer = detokenizer
    special = next(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    assert decode.raw(special).decode() == tokenizer.id_to_token(special)
    for unknown in (2**31 - 1, 2**40, -1):
        assert decode.raw(unknown) == b""
