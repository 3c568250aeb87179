"""The line from a service to its supervisor: JSON lines on a pipe that the child inherits.

A line is one of::

    {"event": "progress", "stage": "loading weights", "fraction": 0.4}    fraction is null where it is not known
    {"event": "ready", "detail": {"port": 8000}}
    {"event": "fatal", "message": "one sentence"}
    {"event": "restart", "child": "worker", "pid": 4711, "message": "one sentence"}    another child hangs: end it

Without a supervisor (a container), the same calls become log lines.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tercet_shared.errors import ProtocolError, bounded

_MAX_LINE = 16 * 1024

logger = logging.getLogger("tercet")


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    event: Literal["progress", "ready", "fatal", "restart"]
    stage: str = ""
    fraction: float | None = None
    message: str = ""
    child: str = ""
    pid: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


class Reporter(Protocol):
    """Where a service reports its start, and what it notices of others."""

    def progress(self, stage: str, fraction: float | None = None) -> None:
        """Says what is being done, and how far it is (0 to 1)."""

    def ready(self, **detail: Any) -> None:
        """Says that the service does its work now."""

    def fatal(self, message: str) -> None:
        """Says in one sentence why the process is about to end."""

    def restart(self, child: str, pid: int, message: str) -> None:
        """Asks that the process ``pid``, known as ``child``, be ended and started again, and says why."""


class PipeReporter:
    """Writes events as lines to a pipe. A supervisor that is gone is not an error: nobody is left to tell."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd`` and keeps it from being inherited further."""
        os.set_inheritable(fd, False)
        self._fd = fd

    def progress(self, stage: str, fraction: float | None = None) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "progress", "stage": stage, "fraction": fraction})

    def ready(self, **detail: Any) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "ready", "detail": detail})

    def fatal(self, message: str) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "fatal", "message": bounded(message)})

    def restart(self, child: str, pid: int, message: str) -> None:  # noqa: D102  # see Reporter
        self._write({"event": "restart", "child": child, "pid": pid, "message": bounded(message)})

    def _write(self, event: dict[str, Any]) -> None:
        try:
            os.write(self._fd, json.dumps(event).encode() + b"\n")  # under PIPE_BUF or nearly: one write, one line
        except BrokenPipeError:
            logger.debug("the supervisor no longer reads reports")


class LogReporter:
    """Writes events to the log."""

    def progress(self, stage: str, fraction: float | None = None) -> None:  # noqa: D102  # see Reporter
        if fraction is None:
            logger.info("%s", stage)
        else:
            logger.debug("%s %.0f%%", stage, 100 * fraction)

    def ready(self, **detail: Any) -> None:  # noqa: D102  # see Reporter
        logger.info("ready%s", "".join(f" {key}={value}" for key, value in detail.items()))

    def fatal(self, message: str) -> None:  # noqa: D102  # see Reporter
        logger.error("%s", message)

    def restart(self, child: str, pid: int, message: str) -> None:  # noqa: D102  # see Reporter
        logger.warning("the %s (process %d) should be started again: %s", child, pid, message)


def parse_event(line: bytes) -> Event:
    """Returns the event in ``line``. Raises `ProtocolError` when it is none."""
    try:
        raw = json.loads(line[:_MAX_LINE])
        kind = raw["event"]
        if kind not in ("progress", "ready", "fatal", "restart"):
            raise ProtocolError("A child reported an unknown event.")
        fraction = raw.get("fraction")
        return Event(
            event=kind,
            stage=str(raw.get("stage", "")),
            fraction=None if fraction is None else float(fraction),
            message=str(raw.get("message", "")),
            child=str(raw.get("child", "")),
            pid=int(raw.get("pid", 0)),
            detail=dict(raw.get("detail", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"A child reported something that is not an event: {error}") from error
