"""A whole measurement: servers, warm-up, loads and rounds in turn; what there is of it can be looked at any time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet_tools.bench.figures import Figures, ratios
from tercet_tools.bench.http import HttpClient, RequestFailedError
from tercet_tools.bench.load import Generator, Load, Run
from tercet_tools.bench.prompts import RandomIds, RandomWords, Recorded, read_dataset
from tercet_tools.bench.target import Target, first_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_tools.bench.progress import Progress
    from tercet_tools.bench.prompts import Prompts, Question
    from tercet_tools.bench.settings import BenchSettings, Milliseconds

_RATE_SECONDS = 30
"""For so long requests arrive unless the user says something else."""
_AT_ONCE = 128
"""Requests of a rate of infinity unless the user says something else."""


@dataclass
class Result:
    """One load on all servers.

    Attributes:
        load: the load.
        runs: of each server, one per round; a round may be incomplete when the measurement was interrupted.
        limits: of ``--goodput``.
    """

    load: Load
    runs: list[list[Run]]
    limits: dict[str, Milliseconds]

    @property
    def figures(self) -> list[Figures]:
        """Of each server, over all rounds."""
        return [Figures.of(runs, self.limits) for runs in self.runs]

    def rounds(self, server: int) -> list[Figures]:
        """Returns the figures of one server, round by round."""
        return [Figures.of([run], self.limits) for run in self.runs[server]]

    def ratios(self, server: int) -> dict[str, float]:
        """Returns the first server's figures divided by those of another."""
        return ratios(self.rounds(0), self.rounds(server))


@dataclass
class Measurement:
    """What was measured so far.

    Attributes:
        settings: what was asked for.
        seed: the one that was used.
        targets: the servers.
        results: of the loads, in order.
    """

    settings: BenchSettings
    seed: int
    targets: list[Target] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def hopeless(self) -> bool:
        """Whether every request of some load on some server failed."""
        return any(not figures.completed and figures.failed for result in self.results for figures in result.figures)


class Session:
    """Runs a measurement.

    Args:
        settings: checked ones.
        progress: is told how it goes.
    """

    def __init__(self, settings: BenchSettings, progress: Progress) -> None:
        seed = settings.seed if settings.seed is not None else random.SystemRandom().randrange(2**48)
        self.measurement = Measurement(settings, seed)
        self._settings = settings
        self._progress = progress
        self._dataset: tuple[Question, ...] | None = None
        if settings.dataset is not None:
            self._dataset = read_dataset(settings.dataset, chat=settings.endpoint == "chat")
        self._clients = [
            HttpClient(url, headers=_authorization(_nth(settings.api_key, index)), timeout=settings.timeout)
            for index, url in enumerate(settings.url)
        ]

    async def run(self) -> None:
        """Measures everything; cancelling it leaves in `measurement` what there is.

        Raises:
            RequestFailedError: a server does not answer at all, or not what is needed to ask it.
        """
        settings = self._settings
        try:
            for index, (url, client) in enumerate(zip(settings.url, self._clients, strict=True)):
                self.measurement.targets.append(await self._target(url, client, _nth(settings.model, index)))
            prompts = await self._prompts(self.measurement.targets[0])
            await self._warm_up(prompts)
            for number, load in enumerate(loads(settings)):
                await self._measure(load, prompts, self.measurement.seed + 1 + number * settings.rounds)
        finally:
            for client in self._clients:
                client.close()

    async def _target(self, url: str, client: HttpClient, model: str | None) -> Target:
        settings = self._settings
        fields = {"temperature": settings.temperature}
        return Target(
            url=url,
            client=client,
            model=model or await first_model(client, url),
            endpoint=settings.endpoint,
            fields=fields | ({"ignore_eos": True} if settings.ignore_eos else {}) | settings.extra_fields,
        )

    async def _prompts(self, target: Target) -> Prompts:
        settings = self._settings
        if self._dataset is not None:
            return Recorded(lines=self._dataset, output_tokens=settings.output_span)
        if settings.endpoint == "completions":
            return RandomIds(
                vocabulary=settings.vocabulary_span,
                input_tokens=settings.input_span,
                output_tokens=settings.output_span,
                shared_prefix=settings.shared_prefix,
                prefix_seed=self.measurement.seed,
            )
        overhead, per_word = await target.tokens_of_words()
        return RandomWords(
            input_tokens=settings.input_span,
            output_tokens=settings.output_span,
            shared_prefix=settings.shared_prefix,
            prefix_seed=self.measurement.seed,
            overhead=overhead,
            per_word=per_word,
        )

    async def _warm_up(self, prompts: Prompts) -> None:
        """Asks a little: the first requests of a process pay for what later ones find warm."""
        count = self._settings.warmup
        if not count:
            return
        load = Load(
            kind="concurrency", value=min(count, max(_concurrencies(self._settings))), requests=count, duration=None
        )
        for target in self.measurement.targets:
            run = await Generator(target, load, prompts, self.measurement.seed).measure()
            if not run.samples:
                kind, message = next(iter(run.messages.items()))
                raise RequestFailedError(kind, f"{target.url} answers no request: {message}")

    async def _measure(self, load: Load, prompts: Prompts, seed: int) -> None:
        targets, rounds = self.measurement.targets, self._settings.rounds
        result = Result(load, [[] for _ in targets], self._settings.limits)
        self.measurement.results.append(result)
        self._progress.begin(load, rounds * len(targets))
        for number in range(rounds):
            for target, runs in zip(targets, result.runs, strict=True):
                # Every server gets the same requests, and no other round does.
                generator = Generator(target, load, prompts, seed + number, self._progress.advance)
                runs.append(generator.run)
                self._progress.watch(target.url, generator.run)
                await generator.measure()
        self._progress.end()


def loads(settings: BenchSettings) -> list[Load]:
    """Returns what is to be measured: first the closed loops, then the open ones, each in the order given."""
    asked, duration = settings.requests, settings.duration
    found = [
        Load(
            kind="concurrency",
            value=count,
            requests=asked or (None if duration else 4 * count + 4),
            duration=duration,
        )
        for count in _concurrencies(settings)
        if settings.concurrency or not settings.request_rate
    ]
    for rate in settings.request_rate:
        some = _AT_ONCE if rate == float("inf") else max(1, round(_RATE_SECONDS * rate))
        found.append(
            Load(kind="request_rate", value=rate, requests=asked or (None if duration else some), duration=duration)
        )
    return found


def _concurrencies(settings: BenchSettings) -> Sequence[int]:
    return settings.concurrency or (1, 16)


def _nth(values: Sequence[str], index: int) -> str | None:
    """Returns the value of a server: its own, or the one for all."""
    if not values:
        return None
    return values[index] if len(values) > 1 else values[0]


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
