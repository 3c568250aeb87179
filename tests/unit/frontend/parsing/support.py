"""Parsers with ids that can be foretold, and what their events come to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_frontend.parsing.parser import ChoiceParser, ParserPlan
from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

OFFERED = frozenset({"f", "get_weather", "f-2"})


@dataclass
class Message:
    """An answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Joins more events, and checks what is promised of each."""
        for event in events:
            if isinstance(event, ToolCallBegin):
                assert event.index == len(self.calls)
                assert event.id == f"id{event.index}"
                self.calls.append((event.name, ""))
            else:
                assert event.text
                if isinstance(event, Content):
                    self.content += event.text
                elif isinstance(event, Reasoning):
                    assert not self.content
                    assert not self.calls
                    self.reasoning += event.text
                elif isinstance(event, ToolCallArguments):
                    assert event.index == len(self.calls) - 1
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + event.text)


def plan(
    tools: str | None = None,
    reasoning: str | None = None,
    *,
    opening: Opening = Opening.ANSWER,
    offered: frozenset[str] = OFFERED,
    max_calls: int | None = None,
    keep_reasoning: bool = True,
    only_calls: bool = False,
) -> ParserPlan:
    return ParserPlan(
        tools=None if tools is None else TOOL_FORMATS[tools],
        reasoning=None if reasoning is None else REASONING_FORMATS[reasoning],
        opening=opening,
        offered=offered,
        max_calls=max_calls,
        keep_reasoning=keep_reasoning,
        only_calls=only_calls,
    )


def parser(chosen: ParserPlan) -> ChoiceParser:
    numbers = itertools.count()
    return ChoiceParser(chosen, lambda: f"id{next(numbers)}")


def read(chosen: ParserPlan, pieces: Iterable[str]) -> Message:
    message = Message()
    reader = parser(chosen)
    for piece in pieces:
        message.add(reader.push(piece))
        assert reader.num_calls == len(message.calls)
    message.add(reader.finish(stopped=True))
    assert reader.num_calls == len(message.calls)
    return message


def whole(chosen: ParserPlan, text: str) -> Message:
    return read(chosen, [text])


def by_character(chosen: ParserPlan, text: str) -> Message:
    return read(chosen, text)
