"""What the template is given, and how the answer is read: from the fields of a chat request alone."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from tercet_frontend.parsing.tools.deepseek import CALLS as DEEPSEEK
from tercet_frontend.rendering import ChatPlan, compiled, plan_chat
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.validation import validate
from tercet_frontend.tokenizing import ModelText
from tercet_shared.checkpoint import ChatTemplate, GenerationDefaults, SpecialTokens
from tercet_shared.errors import ConfigurationError, InvalidRequestError
from tercet_shared.structured import GrammarKind

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NATIVE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
DUMB = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<assistant>' if add_generation_prompt }}"


class _Tokenizer:
    special = SpecialTokens(bos="<s>")


def model(template: str | None = NATIVE, tools: str = "auto", reasoning: str = "auto", **more: Any) -> ModelText:
    return ModelText(
        cast("Any", _Tokenizer()),
        cast("Any", None),
        None if template is None else ChatTemplate({"default": template}, {}, "a test"),
        GenerationDefaults(),
        (),
        tool_format=tool_format(tools, template),
        reasoning_format=reasoning_format(reasoning, template),
        **more,
    )


def plan(text: ModelText, messages: Any = HI, **fields: Any) -> ChatPlan:
    # special ids are a matter of tokenizers
    return plan_chat(text, validate(ChatRequest, {"model": "m", "messages": messages, **fields}))


def rendered(text: ModelText, messages: Any = HI, **fields: Any) -> str:
    conversation = plan(text, messages, **fields).conversation
    return compiled(text, conversation).render(
        conversation.messages,
        tools=conversation.tools,
        documents=conversation.documents,
        variables=conversation.variables,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
    )


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I call.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "broken"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "5"}, {"type": "text", "text": "pm"}]},
]


def test_native_messages() -> None:
    lines = [json.loads(line) for line in rendered(model(), HISTORY).splitlines()]
    assert lines[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I call.",
        "thinking": "I call.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "broken"}},
        ],
    }
    assert lines[2] == {"role": "tool", "content": "Rain", "tool_call_id": "c1", "name": "get_weather"}
    assert lines[3]["content"] == "5\npm"


def test_templates_that_concatenate_arguments_get_text() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ '(' + c['function']['arguments'] + ')' }}{% endfor %}"
    )
    template += "{% endfor %}{# tools #}"
    assert rendered(model(template), HISTORY) == '({"city": "Ulm"})(broken)'


def test_templates_that_tell_calls_by_missing_content() -> None:
    template = "{% for m in messages %}{{ 'call' if m['content'] is none else 'text' }} {% endfor %}{# tools #}"
    assert rendered(model(template), HISTORY) == "text call text text "


def test_tools_are_shown_as_they_were_given() -> None:
    text = rendered(model(), tools=[WEATHER, NOW])
    shown = json.loads(text[: text.index("]{") + 1])
    function = {key: value for key, value in cast("Any", WEATHER["function"]).items() if key != "strict"}
    assert shown == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert "get_weather" not in rendered(model(), tools=[WEATHER], tool_choice="none")


def test_tools_are_described_where_the_template_knows_none() -> None:
    text = rendered(model(DUMB), tools=[WEATHER])
    assert text.startswith("<system>You have functions.")
    assert '"description": "Weather."' in text
    assert '<tool_call>\n{"name": "<name>", "arguments": <arguments as a JSON object>}\n</tool_call>' in text
    assert text.endswith("<user>Hi\n<assistant>")
    system = rendered(model(DUMB), [{"role": "developer", "content": "Be brief."}, *HI], tools=[NOW])
    assert system.startswith("<system>Be brief.\n\nYou have functions.")
    assert rendered(model(DUMB)) == "<user>Hi\n<assistant>"
    assert rendered(model(DUMB), tools=[NOW], tool_choice="none") == "<user>Hi\n<assistant>"


def test_earlier_calls_are_written_where_the_template_knows_none() -> None:
    assert rendered(model(DUMB), HISTORY) == (
        "<user>Weather?\n"
        '<assistant><tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": broken}\n</tool_call>\n'
        "<user><tool_response>\nRain\n</tool_response>\n<tool_response>\n5\npm\n</tool_response>\n"
        "<assistant>"
    )


def test_the_described_form_is_the_one_that_is_read() -> None:
    for name, example in {"json": '[{"name": "<name>"', "pythonic": "[<name>(", "mistral": "[TOOL_CALLS][{"}.items():
        assert example in rendered(model(DUMB, tools=name), tools=[NOW])


def test_how_the_answer_is_read() -> None:
    text = model(DUMB + "{# <think> </think> #}")
    text = model_with_ids(text, {"<tool_call>": 7})
    chosen = plan(text, tools=[WEATHER, NOW], parallel_tool_calls=False, include_reasoning=False).parser("<think>\n")
    assert chosen is not None
    assert (chosen.tools, chosen.reasoning) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    assert chosen.opening is Opening.PROMPT
    assert chosen.offered == {"get_weather", "now"}
    assert (chosen.max_calls, chosen.keep_reasoning) == (1, False)
    assert chosen.shown_token_ids == {7}
    none = plan(text, tools=[WEATHER], tool_choice="none").parser("<assistant>")
    assert none is not None
    assert (none.tools, none.opening) == (None, Opening.ANSWER)
    assert plan(model(DUMB)).parser("") is None


class _Text(ModelText):
    """Special tokens as they are given."""

    ids: dict[str, int]

    def special_id(self, text: str) -> int | None:
        return self.ids.get(text)


def model_with_ids(text: ModelText, ids: dict[str, int]) -> ModelText:
    values = {name: getattr(text, name) for name in ModelText.__slots__}
    made = _Text(**values)
    object.__setattr__(made, "ids", ids)
    return made


def grammar(text: ModelText, prompt: str = "", **fields: Any) -> Any:
    return plan(model_with_ids(text, {}), **fields).grammar(prompt)


def test_grammars() -> None:
    assert grammar(model(DUMB)) is None
    assert grammar(model(DUMB), tools=[WEATHER]) is None
    required = grammar(model(DUMB), tools=[WEATHER, NOW], tool_choice="required")
    assert (required.kind, required.param) == (GrammarKind.LARK, "tool_choice")
    assert '"name\\": \\"get_weather' in required.text
    assert '"name\\": \\"now' in required.text
    named = {"type": "function", "function": {"name": "now"}}
    assert "get_weather" not in grammar(model(DUMB), tools=[WEATHER, NOW], tool_choice=named).text
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert "get_weather" not in grammar(model(DUMB), tools=[WEATHER, NOW], tool_choice=allowed).text
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert grammar(model(DUMB), response_format=schema).kind is GrammarKind.JSON_SCHEMA
    both = grammar(model(DUMB), response_format=schema, tools=[NOW])
    assert both.kind is GrammarKind.LARK
    assert "either" in both.text
    thinks = model(DUMB, reasoning="think")
    assert "thoughts" in grammar(thinks, response_format=schema).text
    assert grammar(thinks, "</think>", response_format=schema).kind is GrammarKind.JSON_SCHEMA


def test_allowed_tools_leave_the_prompt_as_it_is() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    made = plan(model_with_ids(model(DUMB), {}), tools=[WEATHER, NOW], tool_choice=choice)
    assert "get_weather" in made.conversation.messages[0]["content"]
    parser = made.parser("")
    assert parser is not None
    assert parser.offered == {"now"}


def test_formats_without_json_are_enforced_as_json() -> None:
    text = model(NATIVE, tools="pythonic")
    assert plan(text, tools=[NOW]).tools is TOOL_FORMATS["pythonic"]
    assert plan(text, tools=[NOW], tool_choice="required").tools is TOOL_FORMATS["json"]


VARIABLES = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ documents }}|{{ extra }}"


def test_variables() -> None:
    assert rendered(model(VARIABLES), reasoning_effort="none") == "False|none|None|"
    assert rendered(model(VARIABLES), reasoning_effort="high") == "True|high|None|"
    assert rendered(model(VARIABLES), enable_thinking=False, reasoning_effort="low") == "False|low|None|"
    more = {"extra": [1], "enable_thinking": 5}
    assert rendered(model(VARIABLES), chat_template_kwargs=more, enable_thinking=True) == "5||None|[1]"
    assert rendered(model(VARIABLES), documents=[{"a": 1}]) == "||[{'a': 1}]|"
    assert rendered(model(DUMB), reasoning_effort="none", enable_thinking=False) == "<user>Hi\n<assistant>"


def test_continuing() -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>So"}]
    text = model(DUMB + "{# </think> #}")
    assert rendered(text, messages, continue_final_message=True) == "<user>Hi\n<assistant><think>So"
    parser = plan(model_with_ids(text, {}), messages, continue_final_message=True).parser("anything")
    assert parser is not None
    assert parser.opening is Opening.PROMPT
    assert rendered(text, messages, add_generation_prompt=False) == "<user>Hi\n<assistant><think>So\n"


def test_the_template_of_a_request() -> None:
    with pytest.raises(InvalidRequestError, match="--trust-request-chat-template") as caught:
        plan(model(DUMB), chat_template="x")
    assert caught.value.param == "chat_template"
    trusting = model(None, trust_request_template=True)
    assert rendered(trusting, chat_template="{{ bos_token }}{{ messages[0].content }}") == "<s>Hi"


REFUSED: list[tuple[ModelText, dict[str, Any], str]] = [
    (model(None), {}, "messages"),
    (model(DUMB), {"reasoning_effort": "high"}, "reasoning_effort"),
    (model(DUMB), {"enable_thinking": True}, "enable_thinking"),
    (model(DUMB), {"documents": [{"text": "x"}]}, "documents"),
    (model(DUMB, tools="none"), {"tools": [NOW], "tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("text", "fields", "param"), REFUSED)
def test_what_the_model_cannot(text: ModelText, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(text, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (DUMB, "hermes", None),
        ("tools <tool_call>", "hermes", None),
        ("tools <tool_call> <think> </think>", "hermes", "think"),
        ("tools <tool_call><function=", None, None),
        ("tools [TOOL_CALLS]", "mistral", None),
        ("tools [TOOL_CALLS] [ARGS] [THINK] [/THINK]", "mistral_v11", "mistral"),
        (f"tools {DEEPSEEK} ```json </think>", "deepseek_v3", "think"),
        (f"{DEEPSEEK} tools", "deepseek_v31", None),
        ("tools <|python_tag|>", "llama3_json", None),
        ("tools [func_name1(params_name1=params_value1)]", "pythonic", None),
        ("tools", "json", None),
    ],
)
def test_formats_are_found_in_templates(template: str, tools: str | None, reasoning: str | None) -> None:
    found = tool_format("auto", template)
    assert (None if found is None else found.name) == tools
    thinks = reasoning_format("auto", template)
    assert (None if thinks is None else thinks.name) == reasoning


def test_formats_by_name() -> None:
    for name, form in TOOL_FORMATS.items():
        assert tool_format(name, None) is form
    assert tool_format("qwen", None) is TOOL_FORMATS["hermes"]
    assert reasoning_format("qwen3", None) is REASONING_FORMATS["think"]
    assert (tool_format("none", "<tool_call>"), reasoning_format("none", "</think>")) == (None, None)
    with pytest.raises(ConfigurationError, match=r"--tool-call-parser: there is no parser 'x'.*hermes"):
        tool_format("x", None)
    with pytest.raises(ConfigurationError, match="--reasoning-parser"):
        reasoning_format("x", None)
