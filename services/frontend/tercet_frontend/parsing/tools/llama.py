"""Llama 3.1 and later: the answer is ``{"name": …, "parameters": {…}}``, or several of them with ``;`` between.

``<|python_tag|>`` may come first, and then anywhere. Without it, only the beginning of the answer can be a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.parsing.reader import Markers
from tercet_frontend.parsing.tools.base import Accepts, LaidOutFormat, Layout, is_name, read_object

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink

PYTHON_TAG = "<|python_tag|>"
_TAG = Markers(PYTHON_TAG)


class LlamaJson(LaidOutFormat):
    """See the module."""

    name = "llama3_json"
    markers = (PYTHON_TAG,)
    layout = Layout(before='{"name": "{name}", "parameters": ', after="}", between="; ")

    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:
        """Reads the answer."""
        reader.hold()
        yield from _calls(reader, sink, offered.__contains__)
        while (yield from reader.until(_TAG, sink.content)):
            reader.hold(PYTHON_TAG)
            yield from _calls(reader, sink, is_name)


def _calls(reader: Reader, sink: Sink, accepts: Accepts) -> Steps[None]:
    """Reads calls while there are any; the reader holds what stands before the first."""
    yield from reader.space()
    while (yield from read_object(reader, sink, accepts)):
        reader.hold()
        yield from reader.space()
        yield from reader.literal(";")
        yield from reader.space()
    sink.content(reader.release())
