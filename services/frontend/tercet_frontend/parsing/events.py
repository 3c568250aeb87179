"""What a parser makes of the model's text, in the order in which it is sent to the client.

Joined, the events of a choice are its message: contents and reasonings concatenate, the arguments of a call likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the text that the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins. Its arguments follow, and no other call's until the next begins.

    Attributes:
        index: 0, 1, 2 … in the answer.
        id: unique, and the same whenever the call is mentioned.
        name: of the function; complete.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, which are JSON text once joined; never empty."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Reads one choice's text as it comes. The joined events do not depend on how the text was cut into pushes."""

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun; the choice's finish reason is ``tool_calls`` exactly if there are any."""

    def push(self, text: str) -> list[Event]:
        """Returns what ``text`` completes."""

    def finish(self, *, stopped: bool) -> list[Event]:
        """Returns what was held back; nothing is pushed afterwards.

        Args:
            stopped: the model ended by itself. Otherwise it was cut (by length or a stop string), and markup that is
                not complete is content.
        """
