"""Puts one load on one server: so many clients at once, or so many requests per second."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tercet_tools.bench.http import RequestFailedError, clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tercet_tools.bench.answers import Sample
    from tercet_tools.bench.prompts import Prompts, Question
    from tercet_tools.bench.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a server is loaded.

    Attributes:
        kind: closed loop (``concurrency`` clients) or open loop (``request_rate`` per second, Poisson).
        value: how many; a rate of infinity sends everything at once.
        requests: how many requests in all; None where ``duration`` ends it.
        duration: seconds in which requests are begun; None where ``requests`` ends it.
    """

    kind: Literal["concurrency", "request_rate"]
    value: float
    requests: int | None
    duration: float | None

    @property
    def label(self) -> str:
        """How it is called in reports."""
        return f"{'concurrency' if self.kind == 'concurrency' else 'requests per second'} {self.value:g}"


@dataclass(slots=True)
class Run:
    """What one load on one server gave, complete or not.

    Attributes:
        samples: of the requests that got their whole answers.
        failures: of the others, by kind.
        messages: the first sentence of each kind of failure.
        begun: requests that were sent.
        elapsed: seconds from the first request to the last answer.
        cpu: processor seconds that this process spent meanwhile.
        lateness: open loop: seconds by which requests were sent after they were due.
    """

    samples: list[Sample] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    begun: int = 0
    elapsed: float = 0.0
    cpu: float = 0.0
    lateness: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Requests that were answered or failed."""
        return len(self.samples) + self.failures.total()


class Generator:
    """Runs one load once.

    Args:
        target: the server.
        load: the load.
        prompts: what is asked.
        seed: decides prompts and arrivals.
        notify: called after each request that ended.
    """

    def __init__(
        self, target: Target, load: Load, prompts: Prompts, seed: int, notify: Callable[[], None] = lambda: None
    ) -> None:
        self.run = Run()
        self._target = target
        self._load = load
        self._notify = notify
        self._seed = seed
        questions = prompts.questions(seed)
        self._questions = questions if load.requests is None else itertools.islice(questions, load.requests)
        self._until = math.inf

    async def measure(self) -> Run:
        """Runs the load to its end and returns what it gave; cancelling it leaves in `run` what there is."""
        begin, cpu = clock(), time.process_time()
        self._until = begin + (self._load.duration or math.inf)
        try:
            if self._load.kind == "concurrency":
                async with asyncio.TaskGroup() as clients:
                    for _ in range(int(self._load.value)):
                        clients.create_task(self._client())
            else:
                await self._arrivals(begin)
        finally:
            self.run.elapsed = clock() - begin
            self.run.cpu = time.process_time() - cpu
        return self.run

    async def _client(self) -> None:
        """One client of a closed loop; ends with the questions or the time."""
        for question in self._questions:
            if clock() >= self._until:
                return
            body = self._target.body(question)  # before the clock runs
            await self._ask(body, question, clock())

    async def _arrivals(self, begin: float) -> None:
        """The open loop; ends when all requests have."""
        async with asyncio.TaskGroup() as requests:
            for question, due in zip(self._questions, self._times(begin), strict=False):
                if due >= self._until:
                    return
                body = self._target.body(question)
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                self.run.lateness.append(max(0.0, clock() - due))
                requests.create_task(self._ask(body, question, due))

    def _times(self, begin: float) -> Iterator[float]:
        """Returns when requests are due: gaps are exponential, so arrivals are a Poisson process."""
        draw = random.Random(self._seed)  # noqa: S311  # no secret
        due = begin
        while True:
            yield due
            due += 0.0 if math.isinf(self._load.value) else draw.expovariate(self._load.value)

    async def _ask(self, body: bytes, question: Question, start: float) -> None:
        self.run.begun += 1
        try:
            self.run.samples.append(await self._target.ask(body, question, start))
        except RequestFailedError as error:
            self.run.failures[error.kind] += 1
            self.run.messages.setdefault(error.kind, error.message)
        self._notify()
