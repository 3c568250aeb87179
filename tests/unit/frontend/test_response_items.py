"""The Responses API: from items to chat messages, and from the parser's events to items."""

from __future__ import annotations

from typing import Any

import pytest

from tercet_frontend.api.renaming import renamed
from tercet_frontend.api.response_items import OutputItems
from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_frontend.schemas.responses import ResponsesRequest
from tercet_frontend.schemas.validation import validate
from tercet_shared.errors import ContextLengthError, InvalidRequestError

EVENTS: list[Event] = [
    Reasoning("Hm"),
    Reasoning("."),
    Content("Let me see."),
    ToolCallBegin(0, "call_a", "f"),
    ToolCallArguments(0, '{"x":'),
    ToolCallArguments(0, "1}"),
    ToolCallBegin(1, "call_b", "g"),
    Content("Done."),
]


def chat(items: list[Any], **more: Any) -> list[dict[str, Any]]:
    fields = validate(ResponsesRequest, {"model": "m", "input": items, **more})
    found: list[dict[str, Any]] = fields.chat(fields.items)["messages"]
    return found


def test_items_grow_and_are_closed_in_order() -> None:
    output = OutputItems()
    happenings = [happening for event in EVENTS for happening in output.add(event)]
    assert output.items[-1]["status"] == "in_progress"
    happenings += output.close("incomplete")
    assert output.close() == []
    assert [(item["type"], item["status"]) for item in output.items] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"),
        ("function_call", "completed"), ("message", "incomplete"),
    ]  # fmt: skip
    thought, said, first, second, end = output.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "Let me see."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "f", '{"x":1}')
    assert second["arguments"] == ""
    assert end["content"][0]["text"] == "Done."
    assert len({item["id"] for item in output.items}) == 5
    # Each item: added, then what is in it, then done with what it has become.
    for index, item in enumerate(output.items):
        own = [happening for happening in happenings if happening["output_index"] == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1] == {"type": "response.output_item.done", "output_index": index, "item": item}
        assert {happening["item_id"] for happening in own[1:-1]} == {item["id"]}
    order = [happening["output_index"] for happening in happenings]
    assert order == sorted(order)


def test_log_probabilities_are_kept_with_their_text() -> None:
    output = OutputItems()
    output.add(Content("One"), [{"token": "One"}])
    (delta,) = output.add(Content(" two"), [{"token": " two"}])
    assert delta["logprobs"] == [{"token": " two"}]
    *_, done = output.close()
    assert done["item"]["content"][0]["logprobs"] == [{"token": "One"}, {"token": " two"}]


def test_an_answers_items_are_one_message() -> None:
    items = [
        {"role": "user", "content": "One"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Three"}]},
        {"type": "function_call_output", "call_id": "a", "output": "Four"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"type": "message", "role": "assistant", "content": "Five"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "Six"}]},
    ]

    def call(name: str, call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert chat(items, instructions="Zero") == [
        {"role": "system", "content": "Zero"},
        {"role": "user", "content": "One"},
        {
            "role": "assistant",
            "content": "Two",
            "reasoning_content": "Hm.",
            "tool_calls": [call("f", "a"), call("g", "b")],
        },
        {"role": "tool", "tool_call_id": "b", "content": "Three"},
        {"role": "tool", "tool_call_id": "a", "content": "Four"},
        {"role": "assistant", "content": "Five", "reasoning_content": "So."},
        {"role": "assistant", "content": "Six"},
    ]


def test_an_output_needs_its_call() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat([{"type": "function_call_output", "call_id": "a", "output": "x"}])
    assert caught.value.param == "input[0].call_id"


@pytest.mark.parametrize(
    ("param", "expected"),
    [("tools[3].function.name", "tools[3].name"), ("old", "new"), ("other", "other"), ("older", "older"), (None, None)],
)
def test_errors_name_the_clients_fields(param: str | None, expected: str | None) -> None:
    table = {r"(tools\[\d+\])\.function": r"\1", r"old\b": "new"}
    with pytest.raises(ContextLengthError) as caught, renamed(table):
        raise ContextLengthError(f"{param} is wrong.", param=param)
    assert caught.value.param == expected
    assert caught.value.message == f"{expected} is wrong."
