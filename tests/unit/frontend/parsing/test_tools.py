"""What each format makes of what its models write, and of what only looks like it."""

from __future__ import annotations

import json

import pytest

from tercet_frontend.parsing.events import ToolCallArguments, ToolCallBegin
from tercet_frontend.parsing.parser import ChoiceParser
from tercet_frontend.parsing.tools.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEP
from tests.unit.frontend.parsing.support import Message, by_character, parser, plan, whole

A = '{"a": 1}'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # Hermes
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>', "", [("f", A)]),
    ("hermes", f'<tool_call>{{"arguments":{A},"name":"f"}}</tool_call>', "", [("f", A)]),
    ("hermes", f'Let me see.\n<tool_call>{{"name":"f","arguments":{A}}}</tool_call>\n', "Let me see.\n", [("f", A)]),
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>\n Done.',
        "\n Done.",
        [("f", A), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"x":"</tool_call>}\\""}}</tool_call>', "",
     [("f", '{"x":"</tool_call>}\\""}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", A)]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
    ("hermes", f'<tool_call>{{"id": 5, "type": "function", "name":"f","parameters":{A}, "more": [{{}}]}}</tool_call>',
     "", [("f", A)]),
    ("hermes", f'<tool_call>{{"name":"unknown_here","arguments":{A}}}</tool_call>', "", [("unknown_here", A)]),
    ("hermes", f'<tool_call>{{"name":"f","arguments":{A}}} and on', " and on", [("f", A)]),
    # No call at all
    ("hermes", "<tool_call> in prose", "<tool_call> in prose", []),
    ("hermes", "a <tool b < c <tool_cal", "a <tool b < c <tool_cal", []),
    ("hermes", '<tool_call>{"name":"f"', '<tool_call>{"name":"f"', []),
    ("hermes", '<tool_call>{"name":"no name","arguments":{}}', '<tool_call>{"name":"no name","arguments":{}}', []),
    ("hermes", '<tool_call>{"what":"f"}</tool_call>', '<tool_call>{"what":"f"}</tool_call>', []),
    ("hermes", '<tool_call>{"name":"f","arguments":[1]}', '<tool_call>{"name":"f","arguments":[1]}', []),
    ("hermes", f'<tool_call><tool_call>{{"name":"f","arguments":{A}}}</tool_call>', "<tool_call>", [("f", A)]),
    # Llama
    ("llama3_json", f'{{"name": "f", "parameters": {A}}}', "", [("f", A)]),
    ("llama3_json", f' {{"name": "f", "parameters": {A}}}; {{"name": "f-2", "parameters": {{}}}}', "",
     [("f", A), ("f-2", "{}")]),
    ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {A}}}', "", [("f", A)]),
    ("llama3_json", f'I call <|python_tag|>{{"name": "unknown", "parameters": {A}}}', "I call ", [("unknown", A)]),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", '{"a": 1, "name": "f", "parameters": {}}', '{"a": 1, "name": "f", "parameters": {}}', []),
    ("llama3_json", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ("llama3_json", 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
    # Plain JSON
    ("json", f'[{{"name": "f", "arguments": {A}}}, {{"name":"f","arguments":{{}}}}]', "", [("f", A), ("f", "{}")]),
    ("json", f'```json\n{{"name": "f", "parameters": {A}}}\n```', "", [("f", A)]),
    ("json", f'```\n[{{"name": "f", "arguments": {A}}}]\n```\nThere.', "\nThere.", [("f", A)]),
    ("json", '{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}', []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("json", "```python\nx = {}\n```", "```python\nx = {}\n```", []),
    ("json", "", "", []),
    ("json", " \n", " \n", []),
    ("json", f'[{{"name": "f", "arguments": {A}}}, {{"age": 3}}]', ', {"age": 3}]', [("f", A)]),
    # Mistral
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {A}}}]', "", [("f", A)]),
    ("mistral", f'So: [TOOL_CALLS] [{{"name":"f","arguments":{A},"id":"123456789"}},{{"name":"g","arguments":{{}}}}]',
     "So: ", [("f", A), ("g", "{}")]),
    ("mistral", f"[TOOL_CALLS]f{A}[TOOL_CALLS]g[ARGS]{{}}", "", [("f", A), ("g", "{}")]),
    ("mistral_v11", f"[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{A}", "", [("f", A)]),
    ("mistral", "[TOOL_CALLS] or [TOOLS] and [1]", "[TOOL_CALLS] or [TOOLS] and [1]", []),
    # DeepSeek
    ("deepseek_v31", f"{CALLS}{CALL}f{SEP}{A}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}", "",
     [("f", A), ("g", "{}")]),
    ("deepseek_v3",
     (f"Hm.{CALLS}{CALL}function{SEP}f\n```json\n{A}\n```{CALL_END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}"
      f"{CALLS_END}"), "Hm.", [("f", A), ("g", "{}")]),
    ("deepseek_v31", f"{CALLS}{CALL}function{SEP}{A}{CALL_END}{CALLS_END}", "", [("function", A)]),
    ("deepseek_v3", f"{CALLS} no {CALL}f", f"{CALLS} no {CALL}f", []),
    # Python
    ("pythonic", '[f(a=1, b="x y", c=[1, -2.5, None]), f-2()]', "", [
        ("f", '{"a": 1, "b": "x y", "c": [1, -2.5, null]}'), ("f-2", "{}"),
    ]),
    ("pythonic", "<|python_start|>[f(d={'k': (True, false)}, s='it\\'s')]<|python_end|>", "",
     [("f", '{"d": {"k": [true, false]}, "s": "it\'s"}')]),
    ("pythonic", '[f(s="""a "quoted"\nline""", t="")]', "", [("f", '{"s": "a \\"quoted\\"\\nline", "t": ""}')]),
    ("pythonic", '[f(s="\\u00e9\\x41\\n\\d\\101", n=1_000, e=1e3)] ', "",
     [("f", '{"s": "éA\\n\\\\dA", "n": 1000, "e": 1000.0}')]),
    ("pythonic", "[f(a=1, ), ]", "", [("f", '{"a": 1}')]),
    ("pythonic", '[f(s="\\ud83d\\ude42\\ud83d")]', "", [("f", '{"s": "🙂\ufffd"}')]),
    ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "f(a=1)", "f(a=1)", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES, ids=lambda value: str(value)[:50])
def test_what_is_read(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = Message(content=content, calls=calls)
    assert whole(plan(form), text) == expected
    assert by_character(plan(form), text) == expected


CUT: list[tuple[str, str, list[tuple[str, str]], str]] = [
    ("hermes", '<tool_call>{"name":"f","arguments":{"a": [1, {"b', [("f", '{"a": [1, {"b')], ""),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a": "x\\', [("f", '{"a": "x\\')], ""),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}\n</tool_c', [("f", "{}")], ""),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a": <b>}}</tool_call>', [("f", '{"a": ')], "<b>}}</tool_call>"),
    ("llama3_json", '{"name":"f","parameters":{"a"', [("f", '{"a"')], ""),
    ("mistral", "[TOOL_CALLS]f{", [("f", "{")], ""),
    ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}}', [("f", "{}")], ""),
    ("deepseek_v31", f'{CALLS}{CALL}f{SEP}{{"a": 1}}{CALL_END[:5]}', [("f", '{"a": 1}')], ""),
    ("pythonic", '[f(a=1, b="x', [("f", '{"a": 1, "b": "x')], ""),
    ("pythonic", "[f(a=g(), b=1)]", [("f", '{"a": ')], "(), b=1)]"),
]


@pytest.mark.parametrize(("form", "text", "calls", "content"), CUT)
def test_an_announced_call_keeps_what_came(form: str, text: str, calls: list[tuple[str, str]], content: str) -> None:
    for read in (whole, by_character):
        found = read(plan(form), text)
        assert found.calls == calls
        assert found.content.endswith(content)


@pytest.mark.parametrize(
    ("form", "beginning", "rest"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":', '{"text": "one two", "n": 1}'),
        ("llama3_json", '{"name":"f","parameters":', '{"text": "one two", "n": 1}'),
        ("json", '[{"name":"f","arguments":', '{"text": "one two", "n": 1}'),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":', '{"text": "one two", "n": 1}'),
        ("mistral_v11", "[TOOL_CALLS]f", '{"text": "one two", "n": 1}'),
        ("deepseek_v31", f"{CALLS}{CALL}f{SEP}", '{"text": "one two", "n": 1}'),
    ],
)
def test_arguments_are_streamed_as_they_come(form: str, beginning: str, rest: str) -> None:
    reader = parser(plan(form))
    assert reader.push(beginning) == []
    assert reader.push(rest[0]) == [ToolCallBegin(0, "id0", "f"), ToolCallArguments(0, rest[0])]
    for char in rest[1:]:
        assert reader.push(char) == [ToolCallArguments(0, char)]


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "json", "mistral", "deepseek_v31", "pythonic"])
def test_text_is_not_held_back(form: str) -> None:
    reader = parser(plan(form))
    for piece in ("Hello", ", ", "world", " {", "x", "}. ", "1 < 2"):
        joined = "".join(getattr(event, "text", "") for event in reader.push(piece))
        assert joined in (piece, piece.strip("<{[`"))


def test_a_brace_that_is_no_call_is_held_for_its_first_key_only() -> None:
    reader = parser(plan("json"))
    assert reader.push('{"') == []
    (event,) = reader.push('age"')
    assert event.text == '{"age"'  # type: ignore[union-attr]


def test_more_calls_than_allowed_are_left_out() -> None:
    text = f'<tool_call>{{"name":"f","arguments":{A}}}</tool_call>\n' * 3 + "End"
    assert whole(plan("hermes", max_calls=1), text) == Message(content="\nEnd", calls=[("f", A)])


def test_enforced_answers_have_no_text_beside_their_calls() -> None:
    call = f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>'
    for cut_short in ("\n<tool_call>\n", "\n<tool", "\n", ""):
        for read in (whole, by_character):
            assert read(plan("hermes", only_calls=True), call + cut_short) == Message(calls=[("f", A)])
    assert whole(plan("hermes", only_calls=True), "<tool_call>\n") == Message(content="<tool_call>\n")


def test_ids() -> None:
    text = "".join(f'[TOOL_CALLS]f{{"a": {number}}}' for number in range(50))
    for form, length in (("mistral", 9), ("json", 29)):
        events = ChoiceParser(plan(form)).push(
            text if form == "mistral" else json.dumps([{"name": "f", "arguments": {}}] * 50)
        )
        ids = [event.id for event in events if isinstance(event, ToolCallBegin)]
        assert len(set(ids)) == 50
        assert {len(each) for each in ids} == {length}
        assert all(each.isalnum() or each.startswith("call_") for each in ids)
