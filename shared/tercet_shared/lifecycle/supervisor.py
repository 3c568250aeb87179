"""Runs the services of one machine: starts them, shows how far they are, watches them, stops them.

Starting: front ends, core, worker, one right after the other; each tolerates that the next is not there yet (the first
front end answers /livez and says in /readyz what it waits for). Once all report ready and /readyz answers 200, the
address is announced.

Restarting: a child with a `RestartPolicy` that dies after it was ready is started again, a few times within a minute.
If another child reports that it hangs (the core, whose worker no longer answers), it is killed and started likewise.

Failing: when one of them ends for good or reports a fatal error, the others are stopped and the sentence that says why
becomes the outcome. A death drags the others along (the front end loses its core), so the sentence of the one that died
by itself counts, not that of the first to complain about it.

Stopping: SIGTERM to the front ends, then the core, then the worker, each when those before have ended or their turn is
over, so that a front end with a stuck client does not leave the others without time. What is left one second after the
services' own grace (3 s by default) is killed. ``insisted`` kills at once.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from tercet_shared.errors import TercetError, UnavailableError
from tercet_shared.lifecycle.process import Child
from tercet_shared.lifecycle.readiness import served_model, url_of, wait_until_ready
from tercet_shared.lifecycle.restarts import Restarts

if TYPE_CHECKING:
    from tercet_shared.lifecycle.plan import Plan
    from tercet_shared.lifecycle.report import Event
    from tercet_shared.lifecycle.terminal import Terminal

MARGIN_S: Final = 1.0
"""Seconds after the grace of the services at which what still runs is killed."""

_TURNS: Final = (0.5, 0.75, 1.0)  # share of the margin after which the next child is asked, whatever this one does
_CAUSE_S: Final = 0.5  # seconds in which a child that reported a fatal error, or one that it is about, may end
_REAP_S: Final = 0.5  # seconds that the kernel is given to end what was killed

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_KILLED: Final = 130  # as shells number an end by SIGINT


@dataclass(slots=True)
class StopRequest:
    """The wish of a person or of the system that all should end: once asked for, and insisted on."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    insisted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the exit code, and the sentence for the user if it failed."""

    code: int
    message: str | None = None


class Supervisor:
    """One run of one plan.

    Args:
        plan: the processes.
        stop: ends the run when it is set, before or after the services are ready.
        terminal: where it is shown.
        grace_s: seconds that the services may take to finish requests; their own setting.
        margin_s: seconds after that until what still runs is killed.
        ready_timeout_s: seconds that ``/readyz`` may take to agree once every service has reported ready.
    """

    def __init__(
        self,
        plan: Plan,
        stop: StopRequest,
        terminal: Terminal,
        *,
        grace_s: float,
        margin_s: float = MARGIN_S,
        ready_timeout_s: float = 15.0,
    ) -> None:
        self._plan = plan
        self._stop = stop
        self._terminal = terminal
        self._grace_s = grace_s
        self._margin_s = margin_s
        self._ready_timeout_s = ready_timeout_s
        self._children = [Child(spec, self) for spec in plan.children]
        self._restarts = {spec.name: Restarts(spec.restart) for spec in plan.children if spec.restart is not None}
        self._timers: dict[str, asyncio.TimerHandle] = {}  # restarts to come, by name
        self._failed = asyncio.Event()
        self._failures: list[Child] = []  # in the order in which they were noticed
        self._stopping = False

    async def run(self) -> Outcome:
        """Runs the services until they are asked to stop or one of them fails. All processes are gone on return."""
        try:
            for child in self._children:
                child.start()
            outcome = await self._watch()
        except TercetError as error:
            outcome = Outcome(EXIT_FAILED, error.message)
        finally:
            await self._stop_all()
        if outcome.code == EXIT_OK and self._stop.insisted.is_set():
            return Outcome(EXIT_KILLED)
        return outcome

    def on_report(self, child: Child, event: Event) -> None:
        """Shows a start, notes a failure, ends a child that hangs. See `Observer`."""
        again = child.name in self._restarts and self._restarts[child.name].used
        if event.event == "progress":
            if not (child.is_ready.is_set() or again):  # what a service says later belongs into its log
                self._terminal.progress(child.name, event.stage, event.fraction)
        elif event.event == "ready":
            if again:
                self._terminal.say(f"The {child.name} is ready again.")
            else:
                self._terminal.ready(child.name)
        elif event.event == "restart":
            self._end_hanging(event)
        elif not (child.is_ready.is_set() and child.name in self._restarts):  # else its end says more
            self._note_failure(child)

    def on_log(self, child: Child, line: str) -> None:
        """Shows a line of a service's log. See `Observer`."""
        self._terminal.log(child.name, line)

    def on_exit(self, child: Child) -> None:
        """Starts a service again, or notes its end. See `Observer`."""
        if self._stopping:
            return
        delay_s = self._delay_s(child)
        if delay_s is None:
            self._note_failure(child)
            return
        self._terminal.say(f"{child.fatal or child.describe_end()} It is started again.")
        self._timers[child.name] = asyncio.get_running_loop().call_later(delay_s, self._start_again, child)

    def _delay_s(self, child: Child) -> float | None:
        """Returns the seconds after which a dead child is started again, or None when that is not to be."""
        restarts = self._restarts.get(child.name)
        if restarts is None:
            return None
        # One that was ready before may be hit while it starts again; what it says itself is final then.
        if not (child.is_ready.is_set() or (restarts.used and child.fatal is None)):
            return None
        return restarts.next_delay_s(asyncio.get_running_loop().time())

    def _start_again(self, dead: Child) -> None:
        del self._timers[dead.name]
        child = Child(dead.spec.restarted(), self)
        self._children[self._children.index(dead)] = child
        try:
            child.start()
        except TercetError as error:
            child.fatal = error.message
            self._note_failure(child)

    def _end_hanging(self, event: Event) -> None:
        for child in self._children:
            # The number says whether it is still the process that was meant, not one that was started since.
            if child.name == event.child and child.name in self._restarts and child.alive and child.pid == event.pid:
                child.fatal = f"The {child.name} hung and was killed: {event.message.rstrip('.')}."
                child.kill()

    def _note_failure(self, child: Child) -> None:
        if self._stopping or child in self._failures:
            return
        self._failures.append(child)
        self._failed.set()

    async def _watch(self) -> Outcome:
        asked = asyncio.create_task(self._stop.asked.wait())
        failed = asyncio.create_task(self._failed.wait())
        announced = asyncio.create_task(self._announce_when_ready())
        waiting: set[asyncio.Task[object]] = {asked, failed, announced}
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if asked in done:
                    return Outcome(EXIT_OK)
                if failed in done:
                    return Outcome(EXIT_FAILED, await self._cause())
                announced.result()  # raises what it ended with
                waiting.discard(announced)
        finally:
            tasks = (asked, failed, announced)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce_when_ready(self) -> None:
        for position in range(len(self._children)):
            await self._children[position].is_ready.wait()
        frontend = next(child for child in self._children if child.spec.role == self._plan.frontend)
        port = frontend.detail.get("port")
        if not isinstance(port, int):
            raise UnavailableError("The front end did not report the port that it listens on.")
        host, key, tls = self._plan.host, self._plan.api_key, self._plan.tls
        await wait_until_ready(host, port, timeout_s=self._ready_timeout_s, tls=tls)
        asked = None if self._plan.needs_key and key is None else await served_model(host, port, key, tls=tls)
        model = asked or self._plan.model
        self._terminal.announce(announcement(url_of(host, port, tls=tls), model, needs_key=self._plan.needs_key))

    async def _cause(self) -> str:
        first = self._failures[0]
        if first.alive:
            with suppress(TimeoutError):  # it may take longer to end than its sentence is worth waiting for
                await asyncio.wait_for(first.exited.wait(), _CAUSE_S)
        for child in reversed(self._children):
            child.look()
        if first.fatal is not None and first.is_ready.is_set() and len(self._failures) == 1:
            await self._next_end(first)  # what it says may be about one whose end is not seen yet
        cause = next((child for child in self._failures if child.fatal is None), first)
        spent = self._restarts[cause.name].spent if cause.name in self._restarts else ""
        return f"{cause.fatal or cause.describe_end()} {spent}".rstrip()

    async def _next_end(self, first: Child) -> None:
        """Waits a moment for the end of any other child."""
        others = [child for child in self._children if child is not first and child.alive]
        ends = [asyncio.create_task(child.exited.wait()) for child in others]
        if ends:
            await asyncio.wait(ends, timeout=_CAUSE_S, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    async def _stop_all(self) -> None:
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        insisted = asyncio.create_task(self._stop.insisted.wait())
        try:
            groups = [list(group) for _, group in groupby(self._children, key=lambda child: child.spec.role)]
            for group, share in zip(groups, _turns(len(groups)), strict=True):
                for child in group:
                    child.terminate()
                until = begin + self._grace_s + self._margin_s * share
                for child in group:
                    if child.alive and not insisted.done():
                        await _first_of(insisted, child, until - loop.time())
                if insisted.done():
                    break
            for child in self._children:
                if child.alive and not insisted.done():
                    await _first_of(insisted, child, begin + self._grace_s + self._margin_s - loop.time())
        finally:
            insisted.cancel()
            await self._kill_all()

    async def _kill_all(self) -> None:
        left = [child for child in self._children if child.alive]
        for child in left:
            self._terminal.say(f"The {child.name} did not end in time and is killed.")
            child.kill()
        try:
            async with asyncio.timeout(_REAP_S):
                for child in left:
                    await child.exited.wait()
        except TimeoutError:
            stuck = " and ".join(f"{child.name} (process {child.pid})" for child in left if child.alive)
            self._terminal.say(f"The kernel has not ended the {stuck} yet.")


def announcement(url: str, model: str, *, needs_key: bool) -> str:
    """Returns what is said when the services are ready: where, and how to ask the first question."""
    question = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    body = shlex.quote(json.dumps({**question, "stream": True}))
    key = ' -H "Authorization: Bearer $TERCET_API_KEY"' if needs_key else ""
    return (
        f"Tercet listens on {url} (model {model}; Ctrl-C stops it). Try:\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d {body}\n"
    )


def _turns(groups: int) -> tuple[float, ...]:
    return _TURNS[-groups:] if groups <= len(_TURNS) else (1.0,) * groups


async def _first_of(insisted: asyncio.Task[bool], child: Child, timeout_s: float) -> None:
    """Waits until the child has ended, someone insists, or the time is over."""
    exited = asyncio.create_task(child.exited.wait())
    try:
        await asyncio.wait({insisted, exited}, timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
    finally:
        exited.cancel()
