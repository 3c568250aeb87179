from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tercet_shared.lifecycle import readiness
from tercet_shared.lifecycle.plan import RestartPolicy
from tercet_shared.lifecycle.supervisor import Outcome, StopRequest, Supervisor
from tercet_shared.lifecycle.terminal import Terminal
from tests.fakes.processes import runs
from tests.fakes.services.supervise import played


def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every answer of a front end take an hour by the clock of the running loop, and no longer than it takes."""
    loop, fetch = asyncio.get_running_loop(), readiness.fetch

    async def slow(*args: Any, **options: Any) -> readiness.Answer:
        answer = await fetch(*args, **options)
        later = loop.time() - time.monotonic() + 3600
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + later)
        return answer

    monkeypatch.setattr(readiness, "fetch", slow)


class Screen:
    """A view, and a standard output, that remembers what is shown and can be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def progress(self, name: str, stage: str, fraction: float | None) -> None:
        self._show(f"{name}: {stage} {fraction}")

    def ready(self, name: str) -> None:
        self._show(f"{name}: ready")

    def line(self, text: str, name: str | None = None) -> None:
        self._show(text if name is None else f"{name} | {text}")

    def refresh(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def _show(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._take, line)

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()

    async def change(self) -> None:
        """Waits until something more is shown."""
        self._changed.clear()
        await self._changed.wait()

    async def shows(self, text: str) -> str:
        """Waits until a line contains ``text`` and returns it."""
        async with asyncio.timeout(60):
            while True:
                self._changed.clear()
                for line in self.lines:
                    if text in line:
                        return line
                await self._changed.wait()

    def out(self) -> io.TextIOBase:
        show = self._show

        class Out(io.TextIOBase):
            def write(self, text: str) -> int:
                show(text)
                return len(text)

        return Out()


class Stage:
    """One supervisor with played services."""

    def __init__(
        self,
        tmp_path: Path,
        flags: dict[str, str],
        grace_s: float,
        restart: dict[str, RestartPolicy],
        **options: Any,
    ) -> None:
        self.notes = tmp_path / "notes"
        self.screen = Screen()
        self.stop = StopRequest()
        self.terminal = Terminal(self.screen.out(), io.StringIO(), self.screen)  # type: ignore[arg-type]  # text out
        plan = played(self.notes, tmp_path, dict(os.environ), flags)
        children = (dataclasses.replace(spec, restart=restart.get(spec.name)) for spec in plan.children)
        plan = dataclasses.replace(plan, children=tuple(children))
        self.supervisor = Supervisor(plan, self.stop, self.terminal, grace_s=grace_s, **options)

    async def run(self) -> Outcome:
        self.terminal.start()
        try:
            return await self.supervisor.run()
        finally:
            assert self.terminal.close(60)

    def noted(self, what: str) -> list[str]:
        """The names (and process ids) that were noted with ``what``, in order."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line.removeprefix(what + " ") for line in lines if line.startswith(what + " ")]

    def pids(self) -> dict[str, int]:
        return {name: int(pid) for name, pid in (line.rsplit(" ", 1) for line in self.noted("start"))}


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not tmp_path: its name is too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes a stage; at the end, checks that none of its processes is left."""
    stages: list[Stage] = []

    def make(
        flags: dict[str, str] | None = None,
        *,
        grace_s: float = 60.0,
        restart: dict[str, RestartPolicy] | None = None,
        **options: Any,
    ) -> Stage:
        stages.append(Stage(tmp_path, flags or {}, grace_s, restart or {}, **options))
        return stages[-1]

    yield make
    for each in stages:
        left = {name: pid for name, pid in each.pids().items() if runs(pid)}
        assert not left
