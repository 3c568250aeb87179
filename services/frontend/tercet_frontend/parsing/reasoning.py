"""What a model thinks before it answers, between two tags at the very beginning.

White space around it belongs to the tags. The opening tag may stand in the prompt already (many templates end with it),
and the closing tag may stand there too, where a template switches thinking off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from tercet_frontend.parsing.reader import SPACE, Markers

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink


class Opening(Enum):
    """Where the reasoning of an answer begins."""

    PROMPT = "prompt"  # the answer begins within it
    ANSWER = "answer"  # the model may begin it
    NEVER = "never"  # it is over before the answer begins


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags of one family.

    Attributes:
        name: in settings.
        opens, closes: the tags.
        implied: the model leaves the opening tag out, so that every answer begins within its reasoning unless the
            prompt has closed it.
    """

    name: str
    opens: str
    closes: str
    implied: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that may be special tokens, and that the parser must see."""
        return (self.opens, self.closes)

    def opening(self, prompt: str) -> Opening:
        """Returns where the reasoning of the answer to ``prompt`` begins; only the prompt's end says so."""
        end = prompt[-200:].rstrip(SPACE)
        if end.endswith(self.closes):
            return Opening.NEVER
        return Opening.PROMPT if self.implied or end.endswith(self.opens) else Opening.ANSWER

    def opening_within(self, beginning: str) -> Opening:
        """Returns where the reasoning begins in what follows ``beginning``, the answer's own first text."""
        opened, closed = beginning.rfind(self.opens), beginning.rfind(self.closes)
        return Opening.PROMPT if opened > closed else Opening.NEVER

    @cached_property
    def _closing(self) -> Markers:
        return Markers(self.closes)

    def read(self, reader: Reader, sink: Sink, opening: Opening) -> Steps[None]:
        """Reads the reasoning, if there is any; what follows is left."""
        if opening is Opening.NEVER:
            return
        reader.hold()
        yield from reader.space()
        # A model may repeat the tag that the prompt ends with.
        opened = yield from reader.literal(self.opens)
        if not opened and opening is Opening.ANSWER:
            sink.content(reader.release())
            return
        reader.drop()
        yield from reader.space()
        blank: list[str] = []  # white space that belongs to the closing tag if that comes next

        def inner(text: str) -> None:
            kept = text.rstrip(SPACE)
            if kept:
                sink.reasoning("".join(blank) + kept)
                blank.clear()
            if len(kept) < len(text):
                blank.append(text[len(kept) :])

        yield from reader.until(self._closing, inner)
        sink.end_reasoning()


FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("deepseek_r1", "<think>", "</think>", implied=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("reasoning", "<reasoning>", "</reasoning>"),
)
