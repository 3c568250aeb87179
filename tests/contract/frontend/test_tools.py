"""Tools and reasoning as the official client sees them, streamed and whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tercet_frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS
from tercet_frontend.text import Detokenizer
from tercet_frontend.tokenizing import ModelText
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.checkpoint import ChatTemplate, Tokenizer
from tests.contract.frontend.conftest import EOS, MODEL, FrontEnd, running
from tests.fakes.core import FakeCore, FakeRequest

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm 🙂"}}\n</tool_call>'
BOTH = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
EXPECTED = [("get_weather", '{"city": "Ulm 🙂"}'), ("now", "{}")]
NAMED: Any = {"type": "function", "function": {"name": "now"}}


@dataclass
class Answer:
    """What came, joined."""

    content: str | None = None
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    deltas: int = 0


async def ask(front_end: FrontEnd, *, stream: bool, messages: Any = QUESTION, **fields: Any) -> Answer:
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    create = front_end.openai.chat.completions.create
    answer = Answer()
    if not stream:
        whole = await create(model=MODEL, messages=messages, extra_body=extra, **fields)
        (choice,) = whole.choices
        message = choice.message
        answer.content, answer.finish_reason = message.content, choice.finish_reason
        answer.reasoning = getattr(message, "reasoning_content", None) or ""
        assert getattr(message, "reasoning", None) == (answer.reasoning or None)
        for call in message.tool_calls or ():
            assert call.type == "function"
            answer.calls.append((call.function.name, call.function.arguments))
            answer.ids.append(call.id)
        return answer
    content = ""
    async for chunk in await create(model=MODEL, messages=messages, stream=True, extra_body=extra, **fields):
        for choice in chunk.choices:
            assert answer.finish_reason is None
            answer.finish_reason = choice.finish_reason
            delta = choice.delta
            content += delta.content or ""
            answer.reasoning += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or ():
                answer.deltas += 1
                assert part.function is not None
                if part.id is not None:
                    assert part.index == len(answer.calls)
                    assert part.type == "function"
                    answer.ids.append(part.id)
                    answer.calls.append((part.function.name or "", ""))
                name, arguments = answer.calls[part.index]
                answer.calls[part.index] = (name, arguments + (part.function.arguments or ""))
    answer.content = content if content or not answer.calls else None
    return answer


EXTRA = {
    "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "enable_thinking",
    "include_reasoning",
}  # fmt: skip

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both
async def test_calls(text: ModelText, says: Any, stream: bool) -> None:
    async with FakeCore(outputs=says(BOTH)) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=stream, tools=TOOLS)
    assert answer.calls == EXPECTED
    assert answer.content is None
    assert answer.finish_reason == "tool_calls"
    assert len(set(answer.ids)) == 2
    assert all(each.startswith("call_") for each in answer.ids)
    assert not stream or answer.deltas > 6  # arguments come as they are generated
    (request,) = core.requests
    assert not request.submit.HasField("grammar")
    prompt = text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert "The weather of a city." in prompt


@both
async def test_content_and_a_call(text: ModelText, says: Any, stream: bool) -> None:
    async with FakeCore(outputs=says(f"I < look.\n{CALL}")) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=stream, tools=TOOLS)
    assert (answer.content, answer.calls, answer.finish_reason) == ("I < look.\n", EXPECTED[:1], "tool_calls")


@both
@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}], ids=["no tools", "none", "empty"]
)
async def test_without_tools_it_is_text(text: ModelText, says: Any, stream: bool, fields: dict[str, Any]) -> None:
    async with FakeCore(outputs=says(CALL)) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=stream, **fields)
    assert (answer.content, answer.calls, answer.finish_reason) == (CALL, [], "stop")


@both
async def test_an_answer_without_calls(text: ModelText, says: Any, stream: bool) -> None:
    said = 'No <tool_call> needed: {"name": "now"}'
    async with FakeCore(outputs=says(said)) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=stream, tools=TOOLS)
    assert (answer.content, answer.calls, answer.finish_reason) == (said, [], "stop")


@both
async def test_a_call_that_is_cut(text: ModelText, says: Any, stream: bool) -> None:
    count = len(text.tokenizer.encode(CALL[: CALL.index("Ulm") + 3], add_special_tokens=False))
    async with FakeCore(outputs=says(CALL)) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=stream, tools=TOOLS, max_completion_tokens=count)
        early = await ask(front_end, stream=stream, tools=TOOLS, max_completion_tokens=6)
        stopped = await ask(front_end, stream=stream, tools=TOOLS, stop=["Ulm"])
    assert answer.finish_reason == "length"
    assert answer.calls == [("get_weather", '{"city": "Ulm')]
    assert (early.calls, early.finish_reason) == ([], "length")
    assert CALL.startswith(early.content or "?")
    assert (stopped.calls, stopped.finish_reason) == ([("get_weather", '{"city": "')], "tool_calls")


@both
async def test_one_call_only(text: ModelText, says: Any, stream: bool) -> None:
    async with FakeCore(outputs=says(BOTH)) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert answer.calls == EXPECTED[:1]


async def test_choices_have_calls_of_their_own(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says(BOTH)) as core, running(text, [core]) as front_end:
        whole = await front_end.openai.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, n=3)
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 6


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        ("required", [CALL, BOTH], ["Hello", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>']),
        (NAMED, ['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'], [CALL, "Hello"]),
    ],
    ids=["required", "named"],
)
async def test_enforced_calls_go_to_the_core_as_a_grammar(
    text: ModelText, says: Any, choice: Any, good: list[str], bad: list[str]
) -> None:
    async with FakeCore(outputs=says(good[0])) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=False, tools=TOOLS, tool_choice=choice)
    assert answer.finish_reason == "tool_calls"
    grammar = core.requests[0].submit.grammar
    assert grammar.kind == pb.GRAMMAR_KIND_LARK
    masks = LLTokenizer(text.tokenizer.backend.to_str(), eos_token=EOS)
    for said, expected in [(each, True) for each in good] + [(each, False) for each in bad]:
        matcher = LLMatcher(masks, LLMatcher.grammar_from_lark(grammar.text))
        ids = text.tokenizer.encode(said, add_special_tokens=False)
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == expected


@both
async def test_a_whole_round(text: ModelText, stream: bool) -> None:
    def outputs(request: FakeRequest) -> list[int]:
        answer = "It rains." if "Rain" in text.tokenizer.decode(request.prompt_ids) else CALL
        return [*text.tokenizer.encode(answer, add_special_tokens=False), EOS]

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end:
        first = await ask(front_end, stream=stream, tools=TOOLS)
        (name, arguments), (identity,) = first.calls[0], first.ids
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": identity, "content": "Rain"},
        ]
        second = await ask(front_end, stream=stream, tools=TOOLS, messages=messages)
    assert (second.content, second.calls, second.finish_reason) == ("It rains.", [], "stop")
    prompt = text.tokenizer.decode(core.requests[1].prompt_ids, skip_special_tokens=False)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nRain\n</tool_response><|im_end|>" in prompt


# --------------------------------------------------------------------------------------------- families and reasoning


def taught(text: ModelText, template: str, tools: str, reasoning: str | None = None) -> ModelText:
    """Returns a model whose markup is special tokens, and with another template."""
    forms = [TOOL_FORMATS[tools], *([] if reasoning is None else [REASONING_FORMATS[reasoning]])]
    backend = Backend.from_str(text.tokenizer.backend.to_str())
    markers = [marker for form in forms for marker in form.markers]
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    return replace(
        text,
        tokenizer=Tokenizer(backend, text.tokenizer.special),
        detokenizer=Detokenizer(backend),
        chat_template=ChatTemplate({"default": template}, {}, "a test"),
        tool_format=forms[0],
        reasoning_format=None if reasoning is None else REASONING_FORMATS[reasoning],
    )


PLAIN = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"


@both
@pytest.mark.parametrize(
    "form", ["hermes", "llama3_json", "json", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31"]
)
async def test_families_with_tokens_of_their_own(text: ModelText, stream: bool, form: str) -> None:
    model = taught(text, PLAIN, form)
    said = TOOL_FORMATS[form].written(EXPECTED)
    if form == "llama3_json":
        said = f"<|python_tag|>{said}"
    ids = [*model.tokenizer.encode(said, add_special_tokens=False), EOS]
    other = model.tokenizer.backend.token_to_id("<|im_start|>")  # special, and none of the family's
    async with (
        FakeCore(outputs=lambda _: [other, *ids], vocab_size=49_200) as core,
        running(model, [core]) as front_end,
    ):
        answer = await ask(front_end, stream=stream, tools=TOOLS)
        without = await ask(front_end, stream=stream)
    assert (answer.content, answer.calls, answer.finish_reason) == (None, EXPECTED, "tool_calls")
    assert without.calls == []
    assert "[TOOL_CALLS]" not in (without.content or "")  # special tokens stay out of answers as ever


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
)
THOUGHT = "I look < at it.\n</think>\n\n"


@both
async def test_reasoning(text: ModelText, says: Any, stream: bool) -> None:
    model = replace(
        text,
        chat_template=ChatTemplate({"default": THINKS}, {}, "a test"),
        reasoning_format=REASONING_FORMATS["think"],
    )
    async with FakeCore(outputs=says(f"{THOUGHT}It rains.")) as core, running(model, [core]) as front_end:
        answer = await ask(front_end, stream=stream)
        hidden = await ask(front_end, stream=stream, include_reasoning=False)
        off = await ask(front_end, stream=stream, reasoning_effort="none")
        cut = await ask(front_end, stream=stream, max_completion_tokens=2)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("I look < at it.", "It rains.", "stop")
    assert (hidden.reasoning, hidden.content) == ("", "It rains.")
    assert (off.reasoning, off.content) == ("", f"{THOUGHT}It rains.")
    assert (cut.reasoning, cut.content, cut.finish_reason) == ("I look", "", "length")


@both
async def test_reasoning_and_calls(text: ModelText, stream: bool) -> None:
    model = taught(text, PLAIN + "<think>", "hermes", "think")
    ids = [*model.tokenizer.encode(f"{THOUGHT}{BOTH}", add_special_tokens=False), EOS]
    async with FakeCore(outputs=lambda _: ids, vocab_size=49_200) as core, running(model, [core]) as front_end:
        answer = await ask(front_end, stream=stream, tools=TOOLS, tool_choice="required")
    assert (answer.reasoning, answer.content, answer.calls) == ("I look < at it.", None, EXPECTED)
    masks = LLTokenizer(model.tokenizer.backend.to_str(), eos_token=EOS)
    matcher = LLMatcher(masks, LLMatcher.grammar_from_lark(core.requests[0].submit.grammar.text))
    assert matcher.consume_tokens(ids[:-1])
    assert matcher.is_accepting()


async def test_a_final_message_is_continued(text: ModelText, says: Any) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is "}]
    async with FakeCore(outputs=says("raining")) as core, running(text, [core]) as front_end:
        answer = await ask(front_end, stream=False, messages=messages, continue_final_message=True)
    assert answer.content == "raining"
    prompt = text.tokenizer.decode(core.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nIt is ")


async def test_templates_of_requests(text: ModelText, says: Any) -> None:
    trusting = replace(text, trust_request_template=True)
    async with FakeCore(outputs=says("Yes")) as core:
        async with running(trusting, [core]) as front_end:
            await ask(front_end, stream=False, chat_template="<{{ x }}>", chat_template_kwargs={"x": 5})
            for template in ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{% x"):
                with pytest.raises(openai.BadRequestError):
                    await ask(front_end, stream=False, chat_template=template)
        assert text.tokenizer.decode(core.requests[0].prompt_ids) == "<5>"
        async with running(text, [core]) as front_end:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(front_end, stream=False, chat_template="x")
        assert caught.value.param == "chat_template"


# --------------------------------------------------------------------------------------------------------- bad requests


def _call(**more: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}, **more}


def _assistant(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [*QUESTION, {"role": "assistant", "tool_calls": list(calls), **more}]}


def _function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    (_function(name="a b"), "tools[0].function.name"),
    (_function(name="a\n"), "tools[0].function.name"),
    (_function(name="x" * 65), "tools[0].function.name"),
    (_function(name=""), "tools[0].function.name"),
    (_function(parameters=[]), "tools[0].function.parameters"),
    (_function(parameters={"type": "string"}), "tools[0].function.parameters"),
    (_function(strict="yes"), "tools[0].function.strict"),
    (_function(parameters={"a": DEEP}), "tools"),
    ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs"),
    ({"documents": [{"a": DEEP}]}, "documents"),
    (_function(description=5), "tools[0].function.description"),
    (_function(description="x" * 300_000), "tools"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ({"tools": [TOOLS[1]] * 129}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [NAMED]}}},
     "tool_choice.allowed_tools.mode"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    (_assistant(_call(id="")), "messages[1].tool_calls[0].id"),
    (_assistant(_call(type="custom")), "messages[1].tool_calls[0].type"),
    (_assistant(_call(function={"name": "f", "arguments": {}})), "messages[1].tool_calls[0].function.arguments"),
    (_assistant(*[_call()] * 129), "messages[1].tool_calls"),
    (_assistant(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[1].content[0].type"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [_call()]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "name": "f", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "system"}]}, "messages[0].content"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {str(number): 1 for number in range(65)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template": "x"}, "chat_template"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"documents": ["x"]}, "documents[0]"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"enable_thinking": True}, "enable_thinking"),
    ({"include_reasoning": 1}, "include_reasoning"),
]  # fmt: skip


async def test_bad_requests(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        for fields, param in BAD:
            response = await _post(front_end, fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param, (fields, error)
            assert len(response.content) < 1_000
    assert core.requests == []


async def test_what_changes_nothing_is_accepted(text: ModelText, says: Any) -> None:
    neutral = {
        "tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "auto",
        "chat_template": None, "chat_template_kwargs": {}, "documents": [], "add_generation_prompt": True,
        "continue_final_message": False, "reasoning_effort": "none", "include_reasoning": True,
        "enable_thinking": False,
    }  # fmt: skip
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        assert (await _post(front_end, {})).status_code == 200
        response = await _post(front_end, neutral)
        assert response.status_code == 200, response.text
        assert (await _post(front_end, {"tools": [], "tool_choice": "none"})).status_code == 200
    assert len({tuple(request.prompt_ids) for request in core.requests}) == 1


async def _post(front_end: FrontEnd, fields: dict[str, Any]) -> httpx.Response:
    body = json.dumps({"model": MODEL, "messages": QUESTION, **fields})
    return await front_end.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
