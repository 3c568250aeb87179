from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tercet_frontend.text import Detokenizer, TextStream
from tests.unit.frontend.text.support import byte_ids, groupings, run, some_ids


def text_of(detokenizer: Detokenizer, ids: list[int], prompt: list[int] | None = None, *, skip: bool = True) -> str:
    return run(TextStream(detokenizer, prompt or [], skip_special_tokens=skip), [[token] for token in ids])[0]


@settings(deadline=None)
@given(data=st.data())
def test_byte_level_text_is_what_the_tokenizer_decodes(smol: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(some_ids(smol))
    for skip in (True, False):
        assert text_of(Detokenizer(smol), ids, skip=skip) == smol.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(raw=st.binary(max_size=24))
@example(raw=b"\xed\xa0")  # would be a surrogate, if UTF-8 had any
def test_ill_formed_bytes_become_what_the_tokenizer_makes_of_them(
    bytes_only: Detokenizer, byte_level: Tokenizer, raw: bytes
) -> None:
    ids = byte_ids(raw)
    assert text_of(bytes_only, ids) == byte_level.decode(ids) == raw.decode("utf-8", "replace")


@settings(deadline=None)
@given(data=st.data())
def test_grouping_does_not_matter(detokenizer: tuple[Detokenizer, Tokenizer], data: st.DataObject) -> None:
    decode, tokenizer = detokenizer
    ids = data.draw(some_ids(tokenizer))
    prompt = data.draw(some_ids(tokenizer))
    grouped = run(TextStream(decode, prompt), data.draw(groupings(ids)))
    whole = run(TextStream(decode, prompt), [ids])
    assert grouped[:3] == whole[:3]


@settings(deadline=None)
@given(text=st.text(max_size=30), data=st.data())
def test_a_code_point_is_never_cut(bytes_only: Detokenizer, text: str, data: st.DataObject) -> None:
    text = text.replace("\ufffd", "")
    pieces = run(TextStream(bytes_only, []), data.draw(groupings(byte_ids(text))))[3]
    assert "\ufffd" not in "".join(pieces)
    stream = TextStream(bytes_only, [])
    so_far = b""
    joined = ""
    for token, byte in zip(byte_ids(text), text.encode(), strict=True):
        so_far += bytes([byte])
        joined += stream.push([token]).text
        assert joined == so_far.decode("utf-8", "ignore")  # neither less nor more than what is complete
    assert stream.push([], finished=True).text == ""


@pytest.mark.parametrize("raw", [b"\xff", b"\x80", b"\xf0\x9f", b"\xe4\xb8", b"\xc0\xaf"])
def test_endless_invalid_bytes_never_stall(bytes_only: Detokenizer, raw: bytes) -> None:
    """Every invalid byte is given out at most three tokens later."""
    stream = TextStream(bytes_only, [])
    ids = byte_ids(raw) * 2_000
    given_out = 0
    for position, token in enumerate(ids, 1):
        given_out += len(stream.push([token]).text)
        expected = len((raw * 2_000)[:position].decode("utf-8", "replace"))
        assert expected - 1 <= given_out <= expected
    assert given_out + len(stream.push([], finished=True).text) == len((raw * 2_000).decode("utf-8", "replace"))


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_endless_invalid_bytes_never_stall_elsewhere(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    token = tokenizer.token_to_id("<0xFF>") if kind == "sentencepiece" else 0
    stream = TextStream(Detokenizer(tokenizer), [])
    silent = 0
    for _ in range(500):
        silent = 0 if stream.push([token]).text else silent + 1
        assert silent < 9


def test_what_is_held_back_is_given_out_at_the_end(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [])
    assert stream.push(byte_ids(b"a\xf0\x9f\x99")).text == "a"
    assert stream.push([], finished=True).text == "\ufffd"


def test_the_last_token_can_stay_out_of_the_text(bytes_only: Detokenizer) -> None:
    delta = TextStream(bytes_only, []).push(byte_ids("abc"), finished=True, drop_last=True)
    assert (delta.text, delta.output_tokens) == ("ab", 3)


def test_a_special_token_within_a_code_point(bytes_only: Detokenizer, byte_level: Tokenizer) -> None:
    first, second, third, fourth = byte_ids("🙂")
    ids = [first, second, 256, third, fourth]
    assert text_of(bytes_only, ids) == byte_level.decode(ids) == "🙂"
    assert text_of(bytes_only, ids, skip=False) == byte_level.decode(ids, skip_special_tokens=False)


def test_added_tokens_and_unknown_ids(bytes_only: Detokenizer, byte_level: Tokenizer) -> None:
    ids = [*byte_ids("a"), 257, 300, 2**31 - 1, *byte_ids("b")]
    assert text_of(bytes_only, ids) == byte_level.decode([*byte_ids("a"), 257, *byte_ids("b")]) == "a«▁tool▁»b"


def test_a_code_point_that_the_prompt_began(bytes_only: Detokenizer) -> None:
    prompt, rest = byte_ids("x🙂")[:-2], byte_ids("🙂")[2:]
    assert text_of(bytes_only, rest + byte_ids("y"), prompt) == "🙂y"
    assert text_of(bytes_only, byte_ids("y"), prompt) == "y"  # the prompt's stray bytes are not the output's
    assert text_of(bytes_only, rest[:1], prompt) == ""
    assert text_of(bytes_only, [], prompt) == ""


def test_leading_space_depends_on_the_prompt(sentencepiece: Tokenizer) -> None:
    decode = Detokenizer(sentencepiece)
    bos, hello, world = (sentencepiece.token_to_id(name) for name in ("<s>", "▁Hello", "▁world"))
    assert text_of(decode, [hello, world], [bos]) == "Hello world"  # begins the text: only <s> is before it
    assert text_of(decode, [world], [bos, hello]) == " world"
    assert text_of(decode, [hello, world], []) == sentencepiece.decode([hello, world])
    space = sentencepiece.token_to_id("▁▁")
    assert text_of(decode, [space, hello], [bos]) == sentencepiece.decode([bos, space, hello]) == "  Hello"


@settings(deadline=None)
@given(data=st.data())
def test_output_continues_the_prompt(detokenizer: tuple[Detokenizer, Tokenizer], data: st.DataObject) -> None:
    """Prompt and output decoded together are the prompt's text and the output's."""
    decode, tokenizer = detokenizer
    texts = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("🙂", "世界", "é x", "hello, runs"))
    units = [
        *texts,
        *([token] for token in range(0, tokenizer.get_vocab_size(), 1 + tokenizer.get_vocab_size() // 300)),
    ]
    whole = [unit for unit in units if "\ufffd" not in tokenizer.decode(unit)]
    valid = st.lists(st.sampled_from(whole), min_size=1, max_size=8).map(
        lambda chosen: [token for unit in chosen for token in unit]
    )
    prompt, output = data.draw(valid), data.draw(valid)
    both = tokenizer.decode(prompt + output)
    before = tokenizer.decode(prompt)
    assert before + text_of(decode, output, prompt) == both


def test_skipped_prompt_tokens_do_not_hide_the_context(wordpiece: Tokenizer) -> None:
    hello, pad, comma, run_ = (wordpiece.token_to_id(name) for name in ("hello", "[PAD]", ",", "run"))
    decode = Detokenizer(wordpiece)
    assert text_of(decode, [comma, run_], [hello, *[pad] * 10]) == ", run"


class _Counted(list[int]):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_a_prompt_without_text_is_not_read_to_its_other_end(detokenizer: tuple[Detokenizer, Tokenizer]) -> None:
    decode, tokenizer = detokenizer
    special = next(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    prompt = _Counted([special] * 10_000)
    decode.decoder(prompt)
    assert prompt.looks < 200


def test_a_stream_that_has_ended_takes_no_more(bytes_only: Detokenizer) -> None:
    stream = TextStream(bytes_only, [])
    stream.push(byte_ids("a"), finished=True)
    assert stream.ended
    with pytest.raises(RuntimeError):
        stream.push(byte_ids("b"))
