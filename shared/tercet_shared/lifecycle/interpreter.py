"""How Python is set for a process whose event loop must never wait long.

The garbage collector. Requests and steps leave no reference cycles behind, so what they held goes at their end, without
the collector; it is for the rare rest. With CPython's defaults it would run every few hundred new objects, and every
now and then walk over all that the start has left (modules, schemas, tokenizer: some hundred thousand objects), a tenth
of a second without an answer.

The interpreter's lock. Threads render and check large requests in a front end, and run the steps in a worker. With
CPython's default, a thread that comes back from waiting, or from a step, would get its turn after up to 5 ms for each
of the others, and it comes back for every token.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tercet_shared.lifecycle.report import Reporter

THRESHOLDS: Final = (50_000, 20, 10)
"""New objects before the youngest are looked at, which takes some milliseconds, and how often that is done before the
next older ones are: a thousand running streams hold some hundred thousand objects."""

SWITCH_S: Final = 0.0002
"""Seconds after which a thread hands the interpreter over to one that waits: many times what the change costs."""


class Settling:
    """A reporter that sets all this before it says that the service is ready.

    Args:
        reporter: to which everything is passed on.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def progress(self, stage: str, fraction: float | None = None) -> None:
        """See ``Reporter``."""
        self._reporter.progress(stage, fraction)

    def ready(self, **detail: Any) -> None:
        """See ``Reporter``."""
        settle()
        self._reporter.ready(**detail)

    def fatal(self, message: str) -> None:
        """See ``Reporter``."""
        self._reporter.fatal(message)

    def restart(self, child: str, pid: int, message: str) -> None:
        """See ``Reporter``."""
        self._reporter.restart(child, pid, message)


def settle() -> None:
    """Sets all this. For the end of a start: what is alive now is taken out of the collector's sight."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
