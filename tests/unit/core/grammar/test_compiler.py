"""Grammars are compiled once, within bounds, whatever they are; what is wrong with one is its own request's affair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import reduce
from typing import Any

import pytest

from tercet_core.grammar.compiler import MAX_CACHED_BYTES, GrammarCompiler
from tercet_core.grammar.proving import Prover
from tercet_core.grammar.vocabulary import Vocabulary
from tercet_shared.errors import InvalidRequestError, OverloadedError
from tercet_shared.structured import Grammar, GrammarKind

JSON, REGEX, CHOICE, LARK, EBNF = GrammarKind


@pytest.fixture
async def compiler(vocabulary: Vocabulary) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    await compiler.close()


def choice(number: int) -> Grammar:
    return Grammar(CHOICE, json.dumps([f"choice {number}", "other"]))


async def test_a_grammar_is_compiled_once_for_all_who_ask(compiler: GrammarCompiler) -> None:
    first = await asyncio.gather(*(compiler.matcher(choice(0)) for _ in range(20)))
    again = await compiler.matcher(choice(0))
    assert compiler.tried == 1
    assert len({id(matcher) for matcher in (*first, again)}) == 21, "each has its own"
    first[0].consume_token(compiler._vocabulary.tokenizer.tokenize_str("other")[0])
    assert not again.is_stopped()
    assert again.compute_ff_tokens() == first[1].compute_ff_tokens()


async def test_one_who_leaves_does_not_take_it_from_the_others(compiler: GrammarCompiler) -> None:
    leaving = asyncio.create_task(compiler.matcher(choice(0)))
    staying = asyncio.create_task(compiler.matcher(choice(0)))
    await asyncio.sleep(0)
    leaving.cancel()
    assert not (await staying).is_error()
    assert compiler.tried == 1


async def test_what_was_refused_is_remembered_and_named_anew(compiler: GrammarCompiler) -> None:
    for param in ("response_format", "guided_regex"):
        with pytest.raises(InvalidRequestError) as caught:
            await compiler.matcher(Grammar(REGEX, "(", param))
        assert caught.value.param == param
    assert compiler.tried == 1


async def test_the_cache_is_bounded_by_number_and_size(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet_core.grammar.compiler.MAX_CACHED", 3)
    compiler = GrammarCompiler(vocabulary)
    for number in (0, 1, 2, 0, 3, 0):
        await compiler.matcher(choice(number))
    assert compiler.tried == 4
    await compiler.matcher(choice(1))
    assert compiler.tried == 5, "the one that nobody asked for longest has left"
    size = len(choice(1).text)
    monkeypatch.setattr("tercet_core.grammar.compiler.MAX_CACHED_BYTES", 2 * size)
    await compiler.matcher(choice(4))
    assert compiler._cached_bytes <= 2 * size < MAX_CACHED_BYTES
    assert len(compiler._cache) == 2
    await compiler.close()


async def test_too_many_at_a_time_are_turned_away(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, max_compiling=4)
    outcomes = await asyncio.gather(*(compiler.matcher(choice(i)) for i in range(6)), return_exceptions=True)
    assert [isinstance(outcome, OverloadedError) for outcome in outcomes] == [False] * 4 + [True] * 2
    assert not (await compiler.matcher(choice(5))).is_error(), "later there is room again"
    await compiler.close()


async def test_one_tenant_leaves_room_for_the_others(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, max_compiling=8, max_per_tenant=2)
    asked = [compiler.matcher(choice(number), "greedy") for number in range(4)]
    asked += [compiler.matcher(choice(9), "modest"), compiler.matcher(choice(10))]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    turned_away = [isinstance(outcome, OverloadedError) for outcome in outcomes]
    assert turned_away == [False] * 2 + [True] * 2 + [False] * 2
    assert not (await compiler.matcher(choice(3), "greedy")).is_error(), "later there is room again"
    assert not compiler._compiling_for
    await compiler.close()


async def test_large_grammars_do_not_hold_up_a_small_one(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = Prover.translate

    async def translate_small(prover: Prover, grammar: Grammar) -> str:
        if len(grammar.text) > 10_000:
            await asyncio.get_running_loop().create_future()  # as one that takes all of its time
        return await translate(prover, grammar)

    monkeypatch.setattr(Prover, "translate", translate_small)
    compiler = GrammarCompiler(vocabulary)
    names = [f"p{i}" for i in range(3_000)]
    large = [Grammar(JSON, json.dumps({"enum": [number, *names]})) for number in range(4)]
    waiting = [asyncio.create_task(compiler.matcher(grammar)) for grammar in large]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert not (await compiler.matcher(choice(0))).is_error()
    assert not any(task.done() for task in waiting)
    await compiler.close()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_closing_ends_what_is_under_way(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary)
    waiting = asyncio.create_task(compiler.matcher(choice(0)))
    await asyncio.sleep(0)
    await compiler.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def nested(depth: int) -> str:
    return json.dumps(reduce(lambda inner, _: {"type": "array", "items": inner}, range(depth), {"type": "string"}))


def chain(count: int, link: Callable[[str], Any]) -> str:
    """Returns a schema in which so many definitions refer to the next."""
    links = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}})


def rules(count: int, name: str, tail: str = "") -> str:
    return (
        f"start: {name}0\n" + "".join(f"{name}{i}: {name}{i + 1}{tail}\n" for i in range(count)) + f'{name}{count}: "a"'
    )


def one_of(i: int, j: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property {i} {j}": {}}}


WRONG = {
    "not JSON": (JSON, '{"type": '),
    "no schema": (JSON, "3"),
    "nothing": (JSON, "false"),
    "unknown type": (JSON, '{"type": "tomato"}'),
    "no such definition": (JSON, '{"$ref": "#/$defs/missing"}'),
    "not supported": (JSON, '{"type": "array", "uniqueItems": true}'),
    "contradiction": (JSON, '{"type": "string", "minLength": 5, "maxLength": 2}'),
    "open group": (REGEX, "(a"),
    "look-ahead": (REGEX, "(?=a)b"),
    "back reference": (REGEX, r"(a)\1"),
    "no text": (REGEX, r"[^\s\S]"),
    "not a list": (CHOICE, '{"a": 1}'),
    "empty list": (CHOICE, "[]"),
    "not strings": (CHOICE, '["a", 1]'),
    "half a character": (CHOICE, '["\\ud800"]'),
    "no start": (LARK, 'rule: "a"'),
    "undefined rule": (LARK, "start: missing"),
    "internal format": (LARK, ' {"grammars": [{"json_schema": {}}]}'),
    "endless": (LARK, "start: start"),
    "a file": (LARK, "start: @/etc/passwd"),
    "no root": (EBNF, 'rule ::= "a"'),
    "undefined": (EBNF, "root ::= missing"),
    "open string": (EBNF, 'root ::= "a'),
}


async def test_what_is_wrong_is_refused_in_a_sentence(compiler: GrammarCompiler) -> None:
    grammars = [Grammar(kind, text, "structured_outputs") for kind, text in WRONG.values()]
    for name, grammar in zip(WRONG, grammars, strict=True):
        (error,) = await asyncio.gather(compiler.matcher(grammar), return_exceptions=True)
        assert isinstance(error, InvalidRequestError), name
        assert error.param == "structured_outputs"
        assert error.message.startswith("structured_outputs cannot be enforced: ")
        assert len(error.message) < 700
    assert len(compiler._provers) == 1, "no process was lost over it"


HOSTILE = {
    "deeply nested schema": (JSON, nested(500)),
    "nested beyond Python": (JSON, "[" * 100_000),
    "huge enum": (JSON, json.dumps({"enum": [f"value number {i}" for i in range(10_000)]})),
    "cycle of references": (
        JSON,
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    ),
    "reference to itself": (JSON, '{"$ref": "#"}'),
    "long chain of references": (JSON, chain(4_000, lambda to: {"$ref": to})),
    "long chain of lists": (JSON, chain(4_000, lambda to: {"type": "array", "items": {"$ref": to}})),
    "branching chain": (JSON, chain(30, lambda to: {"anyOf": [{"$ref": to}, {"$ref": to}]})),
    "product of alternatives": (
        JSON,
        json.dumps({"allOf": [{"anyOf": [one_of(i, j) for j in range(9)]} for i in range(9)]}),
    ),
    "many properties": (
        JSON,
        json.dumps({"type": "object", "properties": {f"property {i}": {} for i in range(4_000)}}),
    ),
    "many patterns": (JSON, json.dumps({"patternProperties": {f"^(a|aa)*b{i}$": {} for i in range(300)}})),
    "huge number of items": (JSON, '{"type": "array", "minItems": 1000000000}'),
    "huge length": (JSON, '{"type": "string", "minLength": 1000000000}'),
    "large divisor": (JSON, '{"type": "integer", "multipleOf": 999999937}'),
    "nested repetition": (REGEX, "xyz((a{100}){100}){100}"),
    "huge repetition": (REGEX, "((a{1000}){1000}){1000}"),
    "exponential states": (REGEX, "(a|b)*a(a|b){500}"),
    "nested quantifiers": (REGEX, "(x+x+)+y"),
    "deep groups": (REGEX, "(" * 50_000 + "a" + ")" * 50_000),
    "many alternatives": (REGEX, "|".join(f"w{i}" for i in range(30_000))),
    "deep rules": (LARK, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "chain of rules": (LARK, rules(10_000, "r")),
    "chain of terminals": (LARK, rules(8_000, "T", ' "b"')),
    "doubling rules": (LARK, "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"'),
    "doubling terminals": (LARK, "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'),
    "ambiguity": (LARK, 'start: start start | start start start | "a" | '),
    "deep EBNF": (EBNF, "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
}


async def test_whatever_is_asked_for_ends_within_bounds(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, seconds=3.0)
    grammars = [Grammar(kind, text) for kind, text in HOSTILE.values()]
    for grammar in grammars:
        grammar.check()
    outcomes = await asyncio.gather(*(compiler.matcher(grammar) for grammar in grammars), return_exceptions=True)
    taken = set()
    for name, outcome in zip(HOSTILE, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, InvalidRequestError), name
            assert len(outcome.message) < 700
        else:
            assert not outcome.is_error()
            taken.add(name)
    assert {"huge enum", "nested quantifiers", "many alternatives", "branching chain"} <= taken
    assert not {"nested repetition", "deep groups", "cycle of references", "product of alternatives"} & taken
    assert not (await compiler.matcher(choice(1))).is_error(), "others are served afterwards"
    await compiler.close()


async def test_a_grammar_that_takes_for_ever_is_given_up(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, seconds=1.0)
    slow = [Grammar(LARK, rules(11_000 + i, "T", ' "b"')) for i in range(3)]
    outcomes = await asyncio.gather(*(compiler.matcher(grammar) for grammar in slow), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, InvalidRequestError)
        assert "longer than 1 s" in outcome.message
    assert not (await compiler.matcher(choice(0))).is_error()
    await compiler.close()
