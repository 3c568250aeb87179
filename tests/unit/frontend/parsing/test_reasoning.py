"""Reasoning, alone and before calls."""

from __future__ import annotations

import pytest

from tercet_frontend.parsing.events import Content, Reasoning
from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.registry import REASONING_FORMATS
from tests.unit.frontend.parsing.support import Message, by_character, parser, plan, whole

CASES: list[tuple[str, Opening, str, str, str]] = [
    ("think", Opening.ANSWER, "<think>\n I see. \n</think>\n\nYes.", "I see.", "Yes."),
    ("think", Opening.ANSWER, " \n<think>a\n\nb</think>c ", "a\n\nb", "c "),
    ("think", Opening.ANSWER, "Yes. <think>No</think>", "", "Yes. <think>No</think>"),
    ("think", Opening.ANSWER, " <thin", "", " <thin"),
    ("think", Opening.ANSWER, "<think>a < b </thin", "a < b </thin", ""),
    ("think", Opening.ANSWER, "<think></think>Yes", "", "Yes"),
    ("think", Opening.ANSWER, "<think>\n\n</think>\n\n", "", ""),
    ("think", Opening.PROMPT, "\nI see.\n</think>\nYes.", "I see.", "Yes."),
    ("think", Opening.PROMPT, "<think>\nI see.</think>Yes.", "I see.", "Yes."),
    ("think", Opening.PROMPT, "for ever", "for ever", ""),
    ("think", Opening.NEVER, "<think>Yes", "", "<think>Yes"),
    ("deepseek_r1", Opening.PROMPT, "a</think>b</think>", "a", "b</think>"),
    ("mistral", Opening.ANSWER, "[THINK]a[/THINK]b", "a", "b"),
    ("reasoning", Opening.ANSWER, "<reasoning>a</reasoning>b", "a", "b"),
]


@pytest.mark.parametrize(("form", "opening", "text", "reasoning", "content"), CASES)
def test_what_is_read(form: str, opening: Opening, text: str, reasoning: str, content: str) -> None:
    expected = Message(content=content, reasoning=reasoning)
    assert whole(plan(None, form, opening=opening), text) == expected
    assert by_character(plan(None, form, opening=opening), text) == expected


@pytest.mark.parametrize(
    ("form", "prompt", "opening"),
    [
        ("think", "<|user|>Hi<|assistant|>", Opening.ANSWER),
        ("think", "<|assistant|><think>\n", Opening.PROMPT),
        ("think", "<|assistant|><think>\n\n</think>\n\n", Opening.NEVER),
        ("think", "<think>in the middle<|assistant|>", Opening.ANSWER),
        ("deepseek_r1", "<|assistant|>", Opening.PROMPT),
        ("deepseek_r1", "<|assistant|></think>", Opening.NEVER),
        ("mistral", "[/INST][THINK]", Opening.PROMPT),
        ("think", "", Opening.ANSWER),
    ],
)
def test_where_it_begins(form: str, prompt: str, opening: Opening) -> None:
    assert REASONING_FORMATS[form].opening(prompt) is opening


def test_where_it_begins_in_a_continued_message() -> None:
    form = REASONING_FORMATS["think"]
    assert form.opening_within("<think>so far") is Opening.PROMPT
    assert form.opening_within("<think>done</think>so") is Opening.NEVER
    assert form.opening_within("The answer") is Opening.NEVER


def test_reasoning_then_calls() -> None:
    text = '<think>Call f.\n</think>\n\nI call.\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>'
    expected = Message("I call.\n", "Call f.", [("f", '{"a": 1}')])
    assert whole(plan("hermes", "think"), text) == expected
    assert by_character(plan("hermes", "think"), text) == expected
    only = '<think><tool_call></think>\n{"name":"f","parameters":{}}'
    assert whole(plan("llama3_json", "think"), only) == Message("", "<tool_call>", [("f", "{}")])


def test_reasoning_may_be_left_out() -> None:
    assert whole(plan(None, "think", keep_reasoning=False), "<think>a</think>b") == Message("b")


def test_reasoning_is_streamed() -> None:
    reader = parser(plan(None, "think", opening=Opening.PROMPT))
    assert reader.push("Well") == [Reasoning("Well")]
    assert reader.push(", \n") == [Reasoning(",")]  # the space may belong to the tag
    assert reader.push("so </") == [Reasoning(" \nso")]
    assert reader.push("b") == [Reasoning(" </b")]
    assert reader.push("</think>\n") == []
    assert reader.push("Yes") == [Content("Yes")]
