"""What guides allow: answers drawn at random under their masks fit the grammar, whatever is drawn."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from tercet_core.grammar.masks import Masks
from tercet_core.grammar.vocabulary import Vocabulary
from tercet_shared.errors import InvalidRequestError
from tercet_shared.structured import GrammarKind
from tests.fakes.grammars import END, allowed, begin, walk

PERSON = {
    "type": "object",
    "properties": {
        "full name of the person": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "grün"]}, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["full name of the person", "age", "tags", "married"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_a_json_schema_yields_json_of_its_form(vocabulary: Vocabulary, masks: Masks, seed: int) -> None:
    found = walk(vocabulary, masks, begin(vocabulary, GrammarKind.JSON_SCHEMA, json.dumps(PERSON)), random.Random(seed))
    assert found.ended
    value = json.loads(found.text)
    assert list(value) == PERSON["required"]
    assert isinstance(value["full name of the person"], str)
    assert 0 <= value["age"] <= 150
    assert isinstance(value["married"], bool)
    assert set(value["tags"]) <= {"red", "green", "grün"}
    assert found.forced > 20


@pytest.mark.parametrize("schema", ['{"type": "object"}', "true", "{}", '{"type": "array", "x-guidance": {}}'])
@pytest.mark.parametrize("seed", range(4))
def test_any_json_is_json(vocabulary: Vocabulary, masks: Masks, schema: str, seed: int) -> None:
    found = walk(vocabulary, masks, begin(vocabulary, GrammarKind.JSON_SCHEMA, schema), random.Random(seed))
    assert found.ended
    json.loads(found.text)


def test_json_has_no_room_for_endless_white_space(vocabulary: Vocabulary, masks: Masks) -> None:
    options = '{"type": "array", "items": {"type": "integer"}, "x-guidance": {"whitespace_flexible": true}}'
    for grammar in (options, '{"type": "array", "items": {"type": "integer"}}'):
        guide = begin(vocabulary, GrammarKind.JSON_SCHEMA, grammar)
        guide.advance(vocabulary.tokenizer.tokenize_str("["))
        texts = {vocabulary.tokenizer.decode_str([token]) for token in allowed(masks, guide)}
        assert not any(text.isspace() for text in texts)
        guide.advance(vocabulary.tokenizer.tokenize_str("1, 2"))
        assert guide.error is None


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        (GrammarKind.REGEX, r"\d{3}-[a-f]+!?", r"\d{3}-[a-f]+!?"),
        (GrammarKind.REGEX, r"^(yes|no)$", "yes|no"),
        (GrammarKind.REGEX, r"a/b\"(é|你好)*", '(?s)a/b"(é|你好)*'),
        (GrammarKind.CHOICE, '["one", "two three", "a.*b", "[x]|/\\\\\\"\\n"]', r'one|two three|a\.\*b|\[x\]\|/\\"\n'),
        (GrammarKind.CHOICE, '["", "x"]', "x?"),
        (GrammarKind.LARK, 'start: WORD ("," WORD)* "."\nWORD: /[a-z]+/', r"[a-z]+(,[a-z]+)*\."),
        (GrammarKind.EBNF, 'root ::= item ("," item)*\nitem ::= [0-9]+ | "none" " "?', r"(\d+|none ?)(,(\d+|none ?))*"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_answers_match(
    vocabulary: Vocabulary, masks: Masks, kind: GrammarKind, text: str, pattern: str, seed: int
) -> None:
    found = walk(vocabulary, masks, begin(vocabulary, kind, text), random.Random(seed))
    assert re.fullmatch(pattern, found.text), found.text
    assert found.ended


def test_every_choice_can_come_about(vocabulary: Vocabulary, masks: Masks) -> None:
    choices = ["positive", "negative", "not sure"]
    seen = set()
    for seed in range(40):
        guide = begin(vocabulary, GrammarKind.CHOICE, json.dumps(choices))
        seen.add(walk(vocabulary, masks, guide, random.Random(seed)).text)
    assert seen == set(choices)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_forced_follows_from_the_tokens_alone(vocabulary: Vocabulary, masks: Masks, seed: int) -> None:
    text = json.dumps(PERSON)
    first = begin(vocabulary, GrammarKind.JSON_SCHEMA, text)
    tokens = walk(vocabulary, masks, first, random.Random(seed)).tokens
    stepwise = begin(vocabulary, GrammarKind.JSON_SCHEMA, text)
    at = 0
    while at < len(tokens):
        replayed = begin(vocabulary, GrammarKind.JSON_SCHEMA, text, output=tokens[:at])
        assert list(replayed.forced) == list(stepwise.forced)
        assert tokens[at : at + len(stepwise.forced)] == list(stepwise.forced)[: len(tokens) - at]
        step = random.Random(at).randint(1, max(len(stepwise.forced), 1))
        stepwise.advance(tokens[at : at + step])
        at += step
    assert allowed(masks, stepwise) == allowed(masks, first) == [END]


def test_only_the_end_follows_a_complete_answer(vocabulary: Vocabulary, masks: Masks) -> None:
    tokens = vocabulary.tokenizer.tokenize_str("yes")
    for stop_ids, ends in (((END,), [END]), ((), [END]), ((END, 77), [END, 77])):
        guide = begin(vocabulary, GrammarKind.CHOICE, '["yes"]', stop_ids=stop_ids, output=tokens)
        assert allowed(masks, guide) == ends


def test_an_answer_that_may_go_on_ends_as_its_parameters_say(vocabulary: Vocabulary, masks: Masks) -> None:
    tokens = vocabulary.tokenizer.tokenize_str("aa")
    space = vocabulary.tokenizer.tokenize_str(" ")[0]
    for stop_ids, may, may_not in (
        ((END,), {END}, {space}),
        ((), set[int](), {END, space}),  # ignore_eos
        ((space,), {space}, {END}),
    ):
        guide = begin(vocabulary, GrammarKind.REGEX, "a+", stop_ids=stop_ids, output=tokens)
        choice = set(allowed(masks, guide))
        assert may <= choice
        assert not may_not & choice
        assert set(tokens) <= choice


def test_a_special_token_may_be_part_of_a_grammar(vocabulary: Vocabulary, masks: Masks) -> None:
    guide = begin(vocabulary, GrammarKind.LARK, "start: <|im_start|> /[ab]/ <|im_end|>")
    assert allowed(masks, guide) == [1]
    guide.advance([1, vocabulary.tokenizer.tokenize_str("a")[0]])
    assert allowed(masks, guide) == [END]


def test_a_token_that_does_not_follow_is_an_error_of_this_request(vocabulary: Vocabulary) -> None:
    guide = begin(vocabulary, GrammarKind.REGEX, "ab?", output=vocabulary.tokenizer.tokenize_str("zebra"))
    assert isinstance(guide.error, InvalidRequestError)
    assert guide.error.param == "response_format"
    assert "the output does not follow it" in guide.error.message


def test_a_grammar_that_becomes_too_complex_is_an_error_of_this_request(vocabulary: Vocabulary, masks: Masks) -> None:
    healthy = begin(vocabulary, GrammarKind.REGEX, "ab?c*")
    broken = begin(vocabulary, GrammarKind.REGEX, "x*yz((a{1000}){1000}){1000}")
    tokens = vocabulary.tokenizer.tokenize_str
    words = np.zeros((2, 49_152 // 32), np.uint32)
    masks.fill([broken, healthy], words)
    assert broken.error is None, "so far it is simple"
    broken.advance(tokens("y"))
    broken.advance(tokens("z"))
    if broken.error is None:
        masks.fill([broken, healthy], words)
    assert isinstance(broken.error, InvalidRequestError)
    assert len(broken.error.message) < 700
    assert healthy.error is None
    assert set(allowed(masks, healthy)) >= set(tokens("a"))


def test_rows_with_and_without_a_choice_share_a_mask(vocabulary: Vocabulary, masks: Masks) -> None:
    texts = ['{"const": "a long constant text"}', '{"type": "integer"}', '{"type": "string"}', '{"enum": ["x"]}']
    guides = [begin(vocabulary, GrammarKind.JSON_SCHEMA, text) for text in texts]
    alone = [allowed(masks, begin(vocabulary, GrammarKind.JSON_SCHEMA, text)) for text in texts]
    words = np.zeros((len(guides), 49_152 // 32), np.uint32)
    masks.fill([*guides], words)
    rows = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in rows] == alone


ENDLESS = {
    "number": {"type": "number"},
    "bounded number": {"type": "number", "minimum": 3, "maximum": 31},
    "integer": {"type": "integer"},
    "anything": {},
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("start", ["1", "-1", "1.5", "12e1", "3."])
def test_numbers_end_whatever_the_model_wants(
    vocabulary: Vocabulary, masks: Masks, schema: dict[str, object], start: str
) -> None:
    for around in ("%s", '{"a": %s}', "[true, %s]"):
        opening, closing = around.split("%s")
        whole = (
            schema if not opening else {"type": "array", "prefixItems": [{"type": "boolean"}, schema], "items": False}
        )
        if opening.startswith("{"):
            whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        guide = begin(vocabulary, GrammarKind.JSON_SCHEMA, json.dumps(whole))
        guide.advance(vocabulary.tokenizer.tokenize_str(opening))
        tokens = vocabulary.tokenizer.tokenize_str(start)
        if guide.matcher.validate_tokens(tokens) < len(tokens):
            continue  # the schema does not allow such a number
        guide.advance(tokens)
        digits = [vocabulary.tokenizer.tokenize_str(digit)[0] for digit in "3179"]
        written = start
        while len(written) < 60:
            choice = allowed(masks, guide)
            digit = next((token for token in digits if token in choice), None)
            if digit is None:
                break
            guide.advance([digit])
            written += vocabulary.tokenizer.decode_str([digit])
        assert 0 < len(written) - len(start) <= 18, written
        guide.advance(vocabulary.tokenizer.tokenize_str(closing))
        assert guide.error is None
        assert END in allowed(masks, guide)
        json.loads(opening + written + closing)


def test_only_numbers_are_ended(vocabulary: Vocabulary, masks: Masks) -> None:
    digit = vocabulary.tokenizer.tokenize_str("7")[0]
    for kind, text, opening in (
        (GrammarKind.JSON_SCHEMA, '{"type": "string"}', '"'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string"}', '"a, '),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^([0-9]{4}-?){20}$"}', '"'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^[0-9]{80}$"}', '"'),
        (GrammarKind.REGEX, "[0-9]+", ""),
        (GrammarKind.LARK, "start: /[0-9]+/", ""),
        (GrammarKind.LARK, 'start: %json {"type": "string"}', '"'),
    ):
        guide = begin(vocabulary, kind, text)
        guide.advance([*vocabulary.tokenizer.tokenize_str(opening), *[digit] * 50])
        assert guide.error is None, text
        assert digit in allowed(masks, guide), text


def test_a_number_that_must_be_long_becomes_long(vocabulary: Vocabulary, masks: Masks) -> None:
    digit = vocabulary.tokenizer.tokenize_str("7")[0]
    schema = {"type": "integer", "minimum": 5 * 10**18, "maximum": 9 * 10**18}
    guide = begin(vocabulary, GrammarKind.JSON_SCHEMA, json.dumps(schema))
    guide.advance([digit] * 18)
    assert digit in allowed(masks, guide)
    guide.advance([digit])
    assert allowed(masks, guide) == [END]


def test_numbers_in_a_grammar_that_embeds_json(vocabulary: Vocabulary, masks: Masks) -> None:
    guide = begin(vocabulary, GrammarKind.LARK, 'start: "call " %json {"type": "number"} "."')
    guide.advance(vocabulary.tokenizer.tokenize_str("call 7." + "7" * 18))
    assert vocabulary.tokenizer.tokenize_str("7")[0] not in allowed(masks, guide)
