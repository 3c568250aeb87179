"""DeepSeek V3, R1 and V3.1: calls between tokens of their own, which are defined below.

All calls are between `CALLS` and `CALLS_END`. From V3.1 on, each is `CALL`, the name, `SEP`, the arguments, `CALL_END`.
Before, the word "function" stands for the name, which follows `SEP`, and the arguments are in a code fence on the next
line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.parsing.reader import Markers
from tercet_frontend.parsing.tools.base import LaidOutFormat, Layout, begin_call, read_close, read_name

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001  # the tokens are spelled so
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEP = "<｜tool▁sep｜>"  # noqa: RUF001

_CALL = Markers(CALLS, CALL)
_FENCE = "```"


class DeepSeek(LaidOutFormat):
    """V3.1 and later; reads the older calls as well."""

    name = "deepseek_v31"
    markers = (CALLS, CALLS_END, CALL, CALL_END, SEP)
    layout = Layout(before=f"{CALL}{{name}}{SEP}", after=CALL_END, between="", opening=CALLS, closing=CALLS_END)

    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:  # noqa: ARG002  # tags say it
        """Reads the answer."""
        while found := (yield from reader.until(_CALL, sink.content)):
            reader.hold(found)
            if found == CALLS:
                yield from reader.space()
                if not (yield from reader.literal(CALL)):
                    sink.content(reader.release())
                    continue
            if not (yield from _read_call(reader, sink)):
                sink.content(reader.release())
                continue
            if (yield from read_close(reader, sink, CALL_END)):
                yield from read_close(reader, sink, CALLS_END)


class DeepSeekFenced(DeepSeek):
    """The same reader; enforced calls are written in the older way."""

    name = "deepseek_v3"
    layout = Layout(
        before=f"{CALL}function{SEP}{{name}}\n{_FENCE}json\n",
        after=f"\n{_FENCE}{CALL_END}",
        between="\n",
        opening=CALLS,
        closing=CALLS_END,
    )


def _read_call(reader: Reader, sink: Sink) -> Steps[bool]:
    """Reads a call after its first tag."""
    yield from reader.space()
    name = yield from read_name(reader)
    if name is None or not (yield from reader.literal(SEP)):
        return False
    yield from reader.space()
    fenced = False
    if (yield from reader.peek()) != "{":
        # What came before was the word "function".
        name = yield from read_name(reader)
        yield from reader.space()
        fenced = yield from reader.literal(_FENCE)
        if fenced:
            yield from reader.literal("json")
            yield from reader.space()
        if name is None or (yield from reader.peek()) != "{":
            return False
    begin_call(reader, sink, name)
    complete = yield from reader.json(sink.arguments)
    if complete and fenced:
        yield from read_close(reader, sink, _FENCE)
    return True
