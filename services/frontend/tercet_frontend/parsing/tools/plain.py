"""The answer as a whole is JSON: an object with ``name`` and ``arguments``, or an array of them.

A code fence may be around it. For models without a format of their own, and for calls that a grammar enforces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.parsing.tools.base import LaidOutFormat, Layout, read_close, read_list, read_object

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink

FENCE = "```"


class PlainJson(LaidOutFormat):
    """See the module."""

    name = "json"
    layout = Layout(before='{"name": "{name}", "arguments": ', after="}", between=", ", opening="[", closing="]")

    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:
        """Reads the answer."""
        reader.hold()
        yield from reader.space()
        fenced = yield from reader.literal(FENCE)
        if fenced:
            yield from reader.literal("json")
            yield from reader.space()
        read = read_list if (yield from reader.peek()) == "[" else read_object
        if (yield from read(reader, sink, offered.__contains__)):
            if fenced:
                yield from read_close(reader, sink, FENCE)
        else:
            sink.content(reader.release())
        yield from reader.rest(sink.content)
