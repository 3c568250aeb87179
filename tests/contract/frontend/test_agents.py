"""A framework for agents that speaks OpenAI's two APIs, Pydantic AI: its loop of calls and results runs unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, RunContext, ToolOutput, UsageLimits
from pydantic_ai.messages import PartDeltaEvent, TextPartDelta, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import EOS, MODEL, FrontEnd, running
from tests.fakes.core import FakeCore, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tercet_frontend.tokenizing import ModelText

APIS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
apis = pytest.mark.parametrize("api", APIS)


def call(name: str, **arguments: Any) -> str:
    """Returns a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(text: ModelText, *answers: str) -> Callable[[FakeRequest], Sequence[int]]:
    """Makes a core answer one request after the other."""
    left = list(answers)
    return lambda _request: [*text.tokenizer.encode(left.pop(0), add_special_tokens=False), EOS]


def prompts(text: ModelText, core: FakeCore) -> list[str]:
    return [text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) for request in core.requests]


def model(front_end: FrontEnd, api: str) -> Any:
    return APIS[api](MODEL, provider=OpenAIProvider(openai_client=front_end.openai))


@dataclass
class Cities:
    """What the tools of an agent work with."""

    weather: dict[str, str]


def weather_agent(front_end: FrontEnd, api: str, **options: Any) -> Agent[Cities, Any]:
    agent = Agent(model(front_end, api), deps_type=Cities, instructions="Be brief.", retries=2, **options)

    @agent.tool
    def get_weather(context: RunContext[Cities], city: str, days: int = 1) -> str:
        """Says what the weather will be.

        Args:
            context: of the run.
            city: its name.
            days: from now.
        """
        if city not in context.deps.weather:
            raise ModelRetry(f"There is no {city} here.")
        return f"{context.deps.weather[city]} in {days} days"

    return agent


@apis
async def test_a_call_and_its_result(text: ModelText, api: str) -> None:
    answers = [call("get_weather", city="Ulm", days=3), "It will rain."]
    async with FakeCore(outputs=script(text, *answers)) as core, running(text, [core]) as front_end:
        result = await weather_agent(front_end, api).run("Weather in Ulm?", deps=Cities({"Ulm": "rain 🌧"}))
        assert result.output == "It will rain."
        used = result.usage
    first, second = prompts(text, core)
    assert "Be brief." in first
    assert "Says what the weather will be." in first
    assert "rain 🌧 in 3 days" in second
    assert '"city":"Ulm"' in second.replace(" ", "")
    assert (used.requests, used.tool_calls) == (2, 1)
    assert used.input_tokens == sum(len(request.prompt_ids) for request in core.requests)
    assert used.output_tokens == sum(
        len(text.tokenizer.encode(answer, add_special_tokens=False)) + 1 for answer in answers
    )
    (made,) = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
    (got,) = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]
    assert made.tool_call_id == got.tool_call_id


@apis
async def test_calls_beside_one_another_and_what_they_fail_with(text: ModelText, api: str) -> None:
    both = call("get_weather", city="Ulm") + "\n" + call("get_weather", city="Atlantis")
    answers = ["Let me see.\n" + both, call("get_weather", city="Rome"), "Rain there, sun here."]
    async with FakeCore(outputs=script(text, *answers)) as core, running(text, [core]) as front_end:
        agent = weather_agent(front_end, api)
        result = await agent.run("Weather?", deps=Cities({"Ulm": "rain", "Rome": "sun"}))
        assert result.output == "Rain there, sun here."
    _, second, third = prompts(text, core)
    assert "rain in 1 days" in second
    assert "There is no Atlantis here." in second
    assert "sun in 1 days" in third
    assert "Let me see." in third


@apis
async def test_it_streams(text: ModelText, api: str) -> None:
    answers = [call("get_weather", city="Ulm"), "It will rain all day long."]
    async with FakeCore(outputs=script(text, *answers)) as core, running(text, [core]) as front_end:
        pieces: list[str] = []

        async def watch(_context: Any, events: Any) -> None:
            deltas = [event.delta async for event in events if isinstance(event, PartDeltaEvent)]
            pieces.extend(delta.content_delta for delta in deltas if isinstance(delta, TextPartDelta))

        agent = weather_agent(front_end, api)
        result = await agent.run("Weather?", deps=Cities({"Ulm": "rain"}), event_stream_handler=watch)
    assert result.output == answers[1]
    assert len(pieces) >= 3
    assert result.output.endswith("".join(pieces))
    assert result.usage.output_tokens > 0


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: str
    degrees: int


@apis
@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput])
async def test_answers_of_a_form(text: ModelText, api: str, kind: Any) -> None:
    wanted = Forecast(city="Ulm", degrees=7)
    answer = call("final_result", city="Ulm", degrees=7) if kind is ToolOutput else wanted.model_dump_json()
    async with FakeCore(outputs=script(text, answer)) as core, running(text, [core]) as front_end:
        agent = Agent(model(front_end, api), output_type=kind(Forecast))
        result = await agent.run("Ulm?")
        assert result.output == wanted
    (request,) = core.requests
    grammar = request.submit.grammar
    if kind is ToolOutput:  # the answer is a call, which the grammar enforces
        assert grammar.kind == pb.GRAMMAR_KIND_LARK
        assert "final_result" in grammar.text
    elif kind is NativeOutput:
        assert grammar.kind == pb.GRAMMAR_KIND_JSON_SCHEMA
        assert json.loads(grammar.text)["required"] == ["city", "degrees"]


async def test_its_limits_see_the_usage(text: ModelText) -> None:
    answers = [call("get_weather", city="Ulm"), "Rain."]
    async with FakeCore(outputs=script(text, *answers)) as core, running(text, [core]) as front_end:
        agent = weather_agent(front_end, "chat")
        with pytest.raises(Exception, match="total_tokens_limit"):
            await agent.run("Weather?", deps=Cities({"Ulm": "rain"}), usage_limits=UsageLimits(total_tokens_limit=10))
