"""One service process under the supervisor: how it is started, heard, signalled, and found dead."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tercet_shared.errors import ProtocolError, TercetError
from tercet_shared.lifecycle import child as child_program
from tercet_shared.lifecycle.pipes import LineReader
from tercet_shared.lifecycle.report import Event, parse_event

if TYPE_CHECKING:
    from tercet_shared.lifecycle.plan import ChildSpec

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who wants to know. All methods are called on the event loop."""

    def on_report(self, child: Child, event: Event) -> None:
        """The child reported its start, its failure, or that another one hangs."""

    def on_log(self, child: Child, line: str) -> None:
        """The child wrote a line to its standard output or standard error."""

    def on_exit(self, child: Child) -> None:
        """The child is gone. Everything that it reported or wrote has been handed over."""


class Child:
    """One process: `start` once, then events until ``exited`` is set.

    It runs in a process group of its own, so that a Ctrl-C at the terminal reaches the supervisor only, and dies with
    the supervisor (see `tercet_shared.lifecycle.child`). It has no session of its own: Linux shares processors out
    among sessions first, and services wait for each other. What it leaves in its process group is killed when it ends.
    """

    def __init__(self, spec: ChildSpec, observer: Observer) -> None:
        self.spec = spec
        self.exited = asyncio.Event()
        self.is_ready = asyncio.Event()
        self.detail: dict[str, Any] = {}
        """What its ``ready`` report said."""
        self.fatal: str | None = None
        """The sentence of its ``fatal`` report."""
        self.stage: str | None = None
        """What it was doing last, before it was ready."""
        self.returncode: int | None = None
        """Exit code, or minus the signal that killed it, once ``exited`` is set."""
        self._observer = observer
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._reports: LineReader | None = None
        self._logs: LineReader | None = None

    @property
    def name(self) -> str:
        """What people call it."""
        return self.spec.name

    @property
    def alive(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._process is not None and not self.exited.is_set()

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None:
            raise RuntimeError(f"the {self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Starts the process.

        Raises:
            TercetError: the system refused.
        """
        report_read, report_write = os.pipe()
        log_read, log_write = os.pipe()
        command = (
            *(sys.executable, "-I", "-S", str(Path(child_program.__file__)), str(os.getpid())),
            *(*self.spec.argv, f"--report-fd={report_write}"),
        )
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                pass_fds=(report_write, *self.spec.holds),
                env=dict(self.spec.env),
                process_group=0,
            )
        except OSError as error:
            os.close(report_read)
            os.close(log_read)
            raise TercetError(f"The {self.name} cannot be started: {error.strerror}.") from error
        finally:
            os.close(report_write)
            os.close(log_write)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._reports = LineReader(report_read, self._on_report_line)
        self._logs = LineReader(log_read, self._on_log_line)
        self._reports.open()
        self._logs.open()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def look(self) -> None:
        """Takes in what is known by now but has not come up on the loop yet: reports, and the end."""
        if not self.alive or self._reports is None:
            return
        self._reports.drain()
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(0):
            self._on_end()

    def terminate(self) -> None:
        """Asks it to end (SIGTERM)."""
        if self.alive:
            with suppress(ProcessLookupError):  # dead, but not seen yet
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and its process group (SIGKILL)."""
        if self.alive:
            self._kill_group()

    def describe_end(self) -> str:
        """Returns one sentence on how it ended, for a child that did not say so itself."""
        code = self.returncode
        doing = f" while {self.stage}" if self.stage and not self.is_ready.is_set() else ""
        if code is None:
            return f"The {self.name} runs."
        if code >= 0:
            return f"The {self.name} ended unexpectedly{doing} with exit code {code}; what it logged may say why."
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (often the kernel does that when memory runs out)" if -code == signal.SIGKILL else ""
        return f"The {self.name} was killed by {name}{doing}{hint}."

    def _kill_group(self) -> None:
        # Until it is reaped, its process id is its own, and so is the group of that number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _on_end(self) -> None:
        if self._process is None or self.exited.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill_group()
        self.returncode = self._process.wait()  # returns at once: the descriptor said so
        for reader in (self._reports, self._logs):
            if reader is not None:
                reader.drain()
                reader.close()
        self.exited.set()
        self._observer.on_exit(self)

    def _on_report_line(self, line: bytes) -> None:
        try:
            event = parse_event(line)
        except ProtocolError as error:
            logger.warning("the %s: %s", self.name, error)
            return
        if event.event == "progress":
            self.stage = event.stage
        elif event.event == "ready":
            self.detail = event.detail
            self.is_ready.set()
        elif event.event == "fatal" and self.fatal is None:
            self.fatal = event.message
        self._observer.on_report(self, event)

    def _on_log_line(self, line: bytes) -> None:
        self._observer.on_log(self, line.decode(errors="replace"))
