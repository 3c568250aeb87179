"""One line on the terminal that says how far a measurement is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from tercet_tools.bench.http import clock

if TYPE_CHECKING:
    from tercet_tools.bench.load import Load, Run

_EVERY_S = 0.2
_WIDTH = 24
_CLEAR = "\r\x1b[K"


class Progress:
    """Shows nothing unless ``out`` is a terminal. Rewritten at most five times a second, since drawing costs time.

    Args:
        out: where the line goes; standard error.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = out.isatty()
        self._load: Load
        self._run: Run
        self._runs = 1
        self._number = 0
        self._url = ""
        self._begun = 0.0
        self._next = 0.0

    def begin(self, load: Load, runs: int) -> None:
        """Begins a load that is run so many times in all."""
        self._load, self._runs, self._number = load, runs, 0

    def watch(self, url: str, run: Run) -> None:
        """Begins one run of it."""
        self._number += 1
        self._url, self._run, self._begun, self._next = url, run, clock(), 0.0
        self.advance()

    def advance(self) -> None:
        """Draws the line anew if it is time to."""
        if not self._shown or (now := clock()) < self._next:
            return
        self._next = now + _EVERY_S
        done, elapsed = self._run.ended, now - self._begun
        total = self._load.requests
        share = done / total if total else min(1.0, elapsed / (self._load.duration or 1.0))
        count = f"{done}/{total}" if total else f"{done} in {elapsed:.0f} of {self._load.duration:.0f} s"
        bar = "█" * round(share * _WIDTH) + "░" * (_WIDTH - round(share * _WIDTH))
        tokens = sum(sample.output_tokens for sample in self._run.samples[-256:])
        recent = self._run.samples[-256:]
        since = elapsed if len(recent) < 256 else now - min(sample.start for sample in recent)
        rate = f"{tokens / since:.0f} tok/s" if since > 0 and tokens else ""
        failed = f"  {self._run.failures.total()} failed" if self._run.failures else ""
        turn = f"  run {self._number}/{self._runs}" if self._runs > 1 else ""
        self._out.write(f"{_CLEAR}{self._load.label}{turn}  {bar} {count}  {rate}{failed}  {self._url}")
        self._out.flush()

    def end(self) -> None:
        """Clears the line."""
        if self._shown:
            self._out.write(_CLEAR)
            self._out.flush()
