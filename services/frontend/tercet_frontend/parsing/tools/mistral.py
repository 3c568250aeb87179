"""Mistral: a tag and a JSON array, or a tag, a name and its arguments.

``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``; from 2025 on ``[TOOL_CALLS]name{…}`` once per call, in some versions
with ``[ARGS]`` before the arguments and ``[CALL_ID]…`` before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.parsing.reader import Markers
from tercet_frontend.parsing.tools.base import Accepts, LaidOutFormat, Layout, begin_call, is_name, read_list, read_name

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_CALLS = Markers(CALLS)


class Mistral(LaidOutFormat):
    """See the module."""

    name = "mistral"
    markers = (CALLS, CALL_ID, ARGS)
    layout = Layout(
        before='{"name": "{name}", "arguments": ', after="}", between=", ", opening=f"{CALLS}[", closing="]"
    )

    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:  # noqa: ARG002  # tags say it
        """Reads the answer."""
        while (yield from reader.until(_CALLS, sink.content)):
            reader.hold(CALLS)
            yield from reader.space()
            read = read_list if (yield from reader.peek()) == "[" else _read_named
            if not (yield from read(reader, sink, is_name)):
                sink.content(reader.release())

    def new_id(self, random: str) -> str:
        """Returns nine letters and digits: the templates accept no other ids when calls come back."""
        return random[:9]


class MistralNamed(Mistral):
    """The same reader; enforced calls are written in the newer way."""

    name = "mistral_v11"
    layout = Layout(before=f"{CALLS}{{name}}{ARGS}", after="", between="")


def _read_named(reader: Reader, sink: Sink, accepts: Accepts) -> Steps[bool]:
    name = yield from read_name(reader)
    if name is None or not accepts(name):
        return False
    if (yield from reader.literal(CALL_ID)) and (yield from read_name(reader)) is None:
        return False
    yield from reader.literal(ARGS)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        return False
    begin_call(reader, sink, name)
    yield from reader.json(sink.arguments)
    return True
