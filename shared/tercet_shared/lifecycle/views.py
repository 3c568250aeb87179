"""What a start looks like: moving bars at a terminal, plain lines elsewhere. Used by one thread at a time."""

from __future__ import annotations

from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

_NAME_WIDTH: Final = len("front end")


class View(Protocol):
    """Writes to standard error. Every method may raise OSError when nobody reads it any more."""

    def progress(self, name: str, stage: str, fraction: float | None) -> None:
        """Shows what ``name`` is doing, and how far it is (0 to 1)."""

    def ready(self, name: str) -> None:
        """Shows that ``name`` is ready."""

    def line(self, text: str, name: str | None = None) -> None:
        """Shows a line, of ``name`` or of the supervisor itself."""

    def refresh(self) -> None:
        """Lets what moves move on."""

    def finish(self) -> None:
        """Ends the progress display. Lines may follow."""


class PlainView:
    """One line per stage, and per quarter of a stage that can be measured."""

    def __init__(self, stream: TextIO, width: int = _NAME_WIDTH) -> None:
        self._stream = stream
        self._width = width
        self._shown: dict[str, tuple[str, int]] = {}

    def progress(self, name: str, stage: str, fraction: float | None) -> None:  # noqa: D102  # see View
        quarter = int((fraction or 0.0) * 4)
        if self._shown.get(name) == (stage, quarter):
            return
        self._shown[name] = (stage, quarter)
        self.line(stage if fraction is None else f"{stage}: {fraction:.0%}", name)

    def ready(self, name: str) -> None:  # noqa: D102  # see View
        self.line("ready", name)

    def line(self, text: str, name: str | None = None) -> None:  # noqa: D102  # see View
        self._stream.write(f"{text}\n" if name is None else f"{name:<{self._width}} | {text}\n")
        self._stream.flush()

    def refresh(self) -> None:  # noqa: D102  # see View
        pass

    def finish(self) -> None:  # noqa: D102  # see View
        pass


class RichView:
    """One row per service with a bar; lines scroll by above."""

    def __init__(self, stream: TextIO, width: int = _NAME_WIDTH) -> None:
        self._width = width
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.fields[name]:<" + str(width) + "}", style="bold"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,  # the thread that owns the terminal calls `refresh`; no second one writes
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._finished = False

    def progress(self, name: str, stage: str, fraction: float | None) -> None:  # noqa: D102  # see View
        row = self._task(name)
        if fraction is None:
            # `update` takes None for "leave it as it is".
            next(task for task in self._progress.tasks if task.id == row).total = None
            self._progress.update(row, description=stage, completed=0.0)
        else:
            self._progress.update(row, description=stage, total=1.0, completed=min(fraction, 0.999))

    def ready(self, name: str) -> None:  # noqa: D102  # see View
        self._progress.update(self._task(name), description="ready", total=1.0, completed=1.0)

    def line(self, text: str, name: str | None = None) -> None:  # noqa: D102  # see View
        prefix = () if name is None else ((f"{name:<{self._width}} ", "bold"), ("│ ", "dim"))
        self._console.print(Text.assemble(*prefix, text))

    def refresh(self) -> None:  # noqa: D102  # see View
        if self._tasks and not self._finished:
            self._progress.refresh()

    def finish(self) -> None:  # noqa: D102  # see View
        if self._tasks and not self._finished:
            self._progress.stop()
        self._finished = True

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            if not self._tasks and not self._finished:
                self._progress.start()
            self._tasks[name] = self._progress.add_task("", total=None, name=name)
        return self._tasks[name]


def name_width(frontends: int) -> int:
    """Returns the width of the longest name of a service, where there are so many front ends."""
    return _NAME_WIDTH if frontends == 1 else _NAME_WIDTH + len(f" {frontends}")


def choose_view(stream: TextIO, width: int = _NAME_WIDTH) -> View:
    """Returns the view that suits what ``stream`` is; names take ``width`` columns."""
    try:
        interactive = stream.isatty()
    except (OSError, ValueError):
        interactive = False
    return RichView(stream, width) if interactive else PlainView(stream, width)
