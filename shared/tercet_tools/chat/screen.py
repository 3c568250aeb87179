"""How an answer looks while it grows: as it is through a pipe, as Markdown at a terminal."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol, Self, TextIO

from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_FRAME_S: Final = 0.06
"""Seconds between two pictures of a growing answer."""

_MARGIN: Final = 4
"""Lines of the terminal that a growing block leaves free."""

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")


class AnswerView(Protocol):
    """Shows one answer; a context manager around it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def content(self, text: str) -> None:
        """Shows more of the answer."""

    def reasoning(self, text: str) -> None:
        """Shows more of what the model thinks first."""


class PlainAnswer:
    """Writes the answer, and nothing else, as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A broken pipe has nothing to end.
        if self._last not in ("", "\n") and not isinstance(error, OSError):
            self._write("\n")

    def content(self, text: str) -> None:  # noqa: D102  # see AnswerView
        self._write(text)

    def reasoning(self, text: str) -> None:  # noqa: D102  # see AnswerView
        pass

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._last = text[-1]


class MarkdownAnswer:
    """Renders blocks of Markdown: those that are complete for good, the last one again and again while it grows.

    Only the end of a growing block is shown where it is higher than the terminal; once complete it is there as a whole.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._pending = ""
        self._thoughts = ""
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        self._live.update(Text("…", style="dim"), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        self._end_thoughts()
        if self._pending.strip():
            self._console.print(_block(self._pending))

    def reasoning(self, text: str) -> None:  # noqa: D102  # see AnswerView
        self._thoughts += printable(text)
        self._draw(_thoughts(self._thoughts))

    def content(self, text: str) -> None:  # noqa: D102  # see AnswerView
        self._end_thoughts()
        *complete, self._pending = split_blocks(self._pending + printable(text))
        for block in complete:
            self._console.print(_block(block))
        if self._pending.strip():
            self._draw(_block(self._pending), at_once=bool(complete))

    def _end_thoughts(self) -> None:
        if self._thoughts.strip():
            self._live.update("", refresh=True)
            self._console.print(_thoughts(self._thoughts))
        self._thoughts = ""

    def _draw(self, picture: RenderableType, *, at_once: bool = False) -> None:
        now = self._clock()
        if at_once or now - self._drawn >= _FRAME_S:
            self._drawn = now
            self._live.update(_End(picture), refresh=True)


class _End:
    """The last lines of something, as many as fit."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._renderable, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - _MARGIN) :]:
            yield from line
            yield Segment.line()


def _block(text: str) -> Padding:
    return Padding(Markdown(text.strip("\n"), hyperlinks=False), (0, 0, 1, 0))


def _thoughts(text: str) -> Padding:
    return Padding(Text(text.strip(), style="dim italic"), (0, 0, 1, 2))


def printable(text: str) -> str:
    """Returns text without control characters: what a model says must not command the terminal."""
    return _CONTROLS.sub("", text)


def split_blocks(text: str) -> list[str]:
    """Returns the blocks of a growing Markdown text: complete ones, and at the end the one that may still change.

    It is cut before a line that begins at the margin after an empty line, outside of code: what follows then belongs to
    nothing before it.
    """
    cuts = [0]
    position = 0
    fence = ""
    empty = False
    for line in text.splitlines(keepends=True):
        if empty and not line[0].isspace() and not fence:
            cuts.append(position)
        if fence:
            if _closes(line, fence):
                fence = ""
        elif found := _FENCE.match(line):
            fence = found[1]
        empty = not fence and not line.strip()
        position += len(line)
    return [text[begin:end] for begin, end in pairwise([*cuts, len(text)])]


def _closes(line: str, fence: str) -> bool:
    mark = line.strip()
    return len(mark) >= len(fence) and mark == fence[0] * len(mark)
