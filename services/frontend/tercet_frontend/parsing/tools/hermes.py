"""Hermes, Qwen 2.5 and 3, and others: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, once per call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.parsing.reader import Markers
from tercet_frontend.parsing.tools.base import LaidOutFormat, Layout, is_name, read_close, read_object

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPENING = Markers(OPEN)


class Hermes(LaidOutFormat):
    """See the module."""

    name = "hermes"
    markers = (OPEN, CLOSE)
    layout = Layout(before=f'{OPEN}\n{{"name": "{{name}}", "arguments": ', after=f"}}\n{CLOSE}", between="\n")

    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:  # noqa: ARG002  # tags say it
        """Reads the answer."""
        while (yield from reader.until(_OPENING, sink.content)):
            reader.hold(OPEN)
            yield from reader.space()
            if (yield from read_object(reader, sink, is_name)):
                yield from read_close(reader, sink, CLOSE)
            else:
                sink.content(reader.release())
