"""The parser of one choice: reasoning first, then content and calls."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING

from tercet_frontend.parsing.reader import Reader
from tercet_frontend.parsing.reasoning import Opening
from tercet_frontend.parsing.sink import Sink

if TYPE_CHECKING:
    from tercet_frontend.parsing.events import Event
    from tercet_frontend.parsing.reader import Steps
    from tercet_frontend.parsing.reasoning import ReasoningFormat
    from tercet_frontend.parsing.sink import NewId
    from tercet_frontend.parsing.tools.base import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserPlan:
    """What is to be read in the choices of one request; makes their parsers.

    Attributes:
        reasoning: None leaves tags of reasoning in the content.
        opening: where the reasoning begins.
        keep_reasoning: False leaves it out of the answer.
        tools: None leaves calls in the content.
        offered: names of the functions that may be called.
        max_calls: further ones are left out; None keeps all.
        only_calls: a grammar makes the answer calls and nothing else.
        shown_token_ids: special tokens whose text the parsers must see.
    """

    reasoning: ReasoningFormat | None = None
    opening: Opening = Opening.ANSWER
    keep_reasoning: bool = True
    tools: ToolFormat | None = None
    offered: frozenset[str] = frozenset()
    max_calls: int | None = None
    only_calls: bool = False
    shown_token_ids: frozenset[int] = frozenset()

    def __call__(self) -> ChoiceParser:
        """Returns a new parser, for one choice."""
        return ChoiceParser(self)


class ChoiceParser:
    """An `OutputParser`; see there, and `tercet_frontend.parsing.tools.base` for what counts as a call.

    Args:
        plan: what is to be read.
        new_id: makes the ids of calls; by default random ones in the style of the model's family.
    """

    def __init__(self, plan: ParserPlan, new_id: NewId | None = None) -> None:
        self._plan = plan
        self._reader = Reader()
        self._sink = Sink(
            new_id or (lambda: _random_id(plan)),
            max_calls=plan.max_calls,
            keep_reasoning=plan.keep_reasoning,
            only_calls=plan.only_calls,
        )
        self._steps = self._read()

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._sink.num_calls

    def push(self, text: str) -> list[Event]:
        """Returns what ``text`` completes."""
        self._reader.feed(text)
        next(self._steps)
        return self._sink.take()

    def finish(self, *, stopped: bool) -> list[Event]:  # noqa: ARG002  # what is complete does not depend on why it ended
        """Returns what was held back; nothing is pushed afterwards."""
        self._reader.end()
        # The last step reads to the end.
        next(self._steps, None)
        self._sink.end()
        return self._sink.take()

    def _read(self) -> Steps[None]:
        plan, reader, sink = self._plan, self._reader, self._sink
        if plan.reasoning is not None:
            yield from plan.reasoning.read(reader, sink, plan.opening)
        if plan.tools is not None:
            yield from plan.tools.read(reader, sink, plan.offered)
        else:
            yield from reader.rest(sink.content)


def _random_id(plan: ParserPlan) -> str:
    random = token_hex(12)
    return random if plan.tools is None else plan.tools.new_id(random)
