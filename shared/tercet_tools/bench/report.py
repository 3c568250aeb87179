"""A measurement as text for people, and as JSON for programs."""

from __future__ import annotations

import math
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tercet_tools.bench.figures import LATENCIES, QUANTILES, Figures, rounded

if TYPE_CHECKING:
    from tercet_tools.bench.load import Load
    from tercet_tools.bench.session import Measurement, Result

_TITLES = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2e": "end to end ms"}
_PARTS = ("mean", *QUANTILES)
_SECRET = {"api_key"}
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def as_text(result: Result, measurement: Measurement) -> str:
    """Returns one load as a table; several servers stand side by side."""
    figures = result.figures
    lines = [f"{result.load.label} · {_amount(result.load)}"]
    lines += _one(figures[0]) if len(figures) == 1 else _several(result, figures)
    for name, values, target in zip(_names(len(figures)), figures, measurement.targets, strict=False):
        prefix = f"{name}: " if len(figures) > 1 else ""
        for warning in values.warnings():
            lines.append(f"  ! {prefix}{warning}")
        if values.unfinished:
            lines.append(
                f"  ! {prefix}{values.unfinished} requests to {target.url} were still running at the interruption."
            )
    return "\n".join(lines) + "\n"


def heading(measurement: Measurement) -> str:
    """Returns what stands above the tables: which servers, and what they are asked."""
    settings = measurement.settings
    several = len(measurement.targets) > 1
    lines = [
        f"{f'{name}  ' if several else ''}{target.url}  {target.model}"
        for name, target in zip(_names(len(measurement.targets)), measurement.targets, strict=False)
    ]
    asked = f"{settings.dataset}" if settings.dataset else f"{settings.input_tokens} tokens in"
    shared = f" ({settings.shared_prefix} of them shared)" if settings.shared_prefix else ""
    rounds = f" · {settings.rounds} rounds" if settings.rounds > 1 else ""
    lines.append(
        f"{settings.endpoint} · {asked}{shared} · {settings.output_tokens} tokens out · seed {measurement.seed}{rounds}"
    )
    return "\n".join(lines) + "\n"


def as_json(measurement: Measurement, *, interrupted: bool, now: datetime | None = None) -> dict[str, Any]:
    """Returns everything as JSON values; keys to servers are left out."""
    settings = measurement.settings.model_dump(mode="json", exclude=_SECRET)
    return {
        "tool": "tercet bench serve",
        "version": _version(),
        "time": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "settings": settings | {"seed": measurement.seed},
        "servers": [{"url": target.url, "model": target.model} for target in measurement.targets],
        "interrupted": interrupted,
        "loads": [load_as_json(result) for result in measurement.results],
    }


def load_as_json(result: Result) -> dict[str, Any]:
    """Returns one load as JSON values; ``ratios`` are the first server's figures by those of each other one."""
    load = result.load
    values: dict[str, Any] = {
        load.kind: load.value if math.isfinite(load.value) else "inf",
        "requests": load.requests,
        "duration": load.duration,
        "servers": [figures.as_json() for figures in result.figures],
    }
    if len(result.runs) > 1:
        values["ratios"] = [
            {name: rounded(value) for name, value in result.ratios(index).items()}
            for index in range(1, len(result.runs))
        ]
    return values


def _one(figures: Figures) -> list[str]:
    rows = [["", *_PARTS]]
    rows += [
        [_TITLES[name], *(_number(getattr(figures.latencies[name], part)) for part in _PARTS)] for name in LATENCIES
    ]
    lines = _aligned(rows)
    throughput = (
        f"{_number(figures.requests_per_s)} requests/s · {_number(figures.output_tokens_per_s)} output tokens/s · "
        f"{_number(figures.input_tokens_per_s)} input tokens/s"
    )
    lines.append(f"  {throughput}")
    if figures.good_per_s is not None:
        share = figures.good or 0
        lines.append(
            f"  goodput {_number(figures.good_per_s)} requests/s ({share} of {figures.completed} within the limits)"
        )
    cached = f" · {figures.cached_tokens} prompt tokens cached" if figures.cached_tokens else ""
    lines.append(
        f"  {figures.completed} answered, {sum(figures.failed.values())} failed in {figures.seconds:.1f} s · "
        f"{_number(figures.events_per_token)} events per token{cached}"
    )
    lines.append(f"  load generator: {_client(figures)}")
    return lines


def _several(result: Result, figures: list[Figures]) -> list[str]:
    names = _names(len(figures))
    compared = [result.ratios(index) for index in range(1, len(figures))]
    rows = [["", "", *names, *(f"{names[0]}/{name}" for name in names[1:])]]

    def row(title: str, part: str, key: str) -> None:
        values = [_number(server.flat()[key]) for server in figures]
        rows.append([title, part, *values, *(_number(ratio.get(key, math.nan)) for ratio in compared)])

    for name in LATENCIES:
        for index, part in enumerate(_PARTS):
            row(_TITLES[name] if index == 0 else "", part, f"{name}_{part}_ms")
    row("requests/s", "", "requests_per_s")
    row("output tokens/s", "", "output_tokens_per_s")
    row("input tokens/s", "", "input_tokens_per_s")
    if figures[0].good is not None:
        row("goodput/s", "", "good_requests_per_s")
    rows.append(
        ["events per token", "", *(_number(server.events_per_token) for server in figures), *["" for _ in compared]]
    )
    rows.append(["failed", "", *(str(sum(server.failed.values())) for server in figures), *["" for _ in compared]])
    lines = _aligned(rows)
    lines += [f"  load generator, {name}: {_client(server)}" for name, server in zip(names, figures, strict=False)]
    return lines


def _client(figures: Figures) -> str:
    return f"{_number(figures.client_cpu_us_per_token)} µs of CPU per token, {figures.client_busy:.0%} of one processor"


def _amount(load: Load) -> str:
    return f"{load.requests} requests" if load.requests is not None else f"{load.duration:g} s"


def _names(count: int) -> list[str]:
    return [_NAMES[index] if index < len(_NAMES) else str(index + 1) for index in range(count)]


def _number(value: float) -> str:
    """Returns a number with three digits that count, and more where it is large."""
    if not math.isfinite(value):
        return "n/a"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or value == 0 else 4
    return f"{value:,.{digits}f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Returns the rows with columns of equal width: text to the left, numbers to the right."""
    words = 2 if rows[0][1] == "" else 1
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < words else cell.rjust(max(width, 8))
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _version() -> str:
    try:
        return version("tercet-shared")
    except PackageNotFoundError:
        return "unknown"
