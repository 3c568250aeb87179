"""Latency and throughput by load as one SVG picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_tools.bench.session import Measurement, Result

_COLORS: Final = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6")
_PANELS: Final = (
    ("time to first token, ms", ("ttft_p50_ms", "ttft_p99_ms")),
    ("time per output token, ms", ("tpot_p50_ms", "tpot_p99_ms")),
    ("between events, ms", ("itl_p50_ms", "itl_p99_ms")),
    ("end to end, ms", ("e2e_p50_ms", "e2e_p99_ms")),
    ("output tokens per second", ("output_tokens_per_s",)),
    ("requests per second", ("requests_per_s",)),
)
_DASHES: Final = ("", ' stroke-dasharray="5 4"')
_COLUMNS: Final = 3
_WIDTH, _HEIGHT = 340, 240  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 40  # around its frame
_FONT: Final = 'font-family="sans-serif" font-size="11"'
_LEGEND: Final = 22  # height of a line of the legend


@dataclass(frozen=True, slots=True)
class _Line:
    """Values of one figure by load; NaN where there is none.

    Attributes:
        runs: first and last load, and one more, of those that are of one kind: only they are joined.
    """

    values: Sequence[float]
    runs: Sequence[range]
    color: str
    dash: str


def draw(measurement: Measurement) -> str:
    """Returns the picture: a panel for each figure, a colour for each server, medians solid and p99 dashed.

    Loads stand in the order in which they ran, at equal distances, since a rate may be infinite.
    """
    results = [result for result in measurement.results if any(figures.completed for figures in result.figures)]
    rows = math.ceil(len(_PANELS) / _COLUMNS)
    legend = _LEGEND * (len(measurement.targets) + 1) + 8
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, target in enumerate(measurement.targets):
        y = _LEGEND * (index + 1)
        parts.append(f'<line x1="16" x2="44" y1="{y - 4}" y2="{y - 4}" stroke="{_color(index)}" stroke-width="2"/>')
        parts.append(f'<text x="52" y="{y}">{escape(f"{target.url}  {target.model}")}</text>')
    parts.append(f'<text x="52" y="{legend - 12}" fill="#666">solid: median, dashed: 99th percentile</text>')
    labels = [_label(result) for result in results]
    kinds = [result.load.kind for result in results]
    starts = [index for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    runs = [range(begin, end) for begin, end in pairwise([*starts, len(kinds)])]
    flat = [[figures.flat() for figures in result.figures] for result in results]
    for number, (title, keys) in enumerate(_PANELS):
        lines = [
            _Line([load[server][key] for load in flat], runs, _color(server), dash)
            for server in range(len(measurement.targets))
            for key, dash in zip(keys, _DASHES, strict=False)
        ]
        row, column = divmod(number, _COLUMNS)
        parts.append(f'<g transform="translate({column * _WIDTH},{legend + row * _HEIGHT})">')
        parts += _panel(title, labels, lines)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, labels: Sequence[str], lines: Sequence[_Line]) -> list[str]:
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    top = max((value for line in lines for value in line.values if math.isfinite(value)), default=0.0) or 1.0
    step = _step(top)
    ticks = math.ceil(top / step)

    def x(index: int) -> float:
        return _LEFT + inner_width * (index + 0.5) / max(1, len(labels))

    def y(value: float) -> float:
        return _TOP + inner_height * (1 - value / (ticks * step))

    parts = [f'<text x="{_LEFT}" y="{_TOP - 12}" font-weight="bold">{escape(title)}</text>']
    for tick in range(ticks + 1):
        level = y(tick * step)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{level + 4:.1f}" text-anchor="end" fill="#444">{tick * step:g}</text>')
    for index, label in enumerate(labels):
        parts.append(
            f'<text x="{x(index):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>'
        )
    for line in lines:
        for run in line.runs:
            points = [(x(index), y(line.values[index])) for index in run if math.isfinite(line.values[index])]
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="1.8"{line.dash}/>')
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{line.color}"/>' for a, b in points]
    return parts


def _label(result: Result) -> str:
    load = result.load
    value = "∞" if math.isinf(load.value) else f"{load.value:g}"
    return f"{value} clients" if load.kind == "concurrency" else f"{value}/s"


def _step(top: float) -> float:
    """Returns a round distance between ticks, so that there are four to eight up to ``top``."""
    size = 10.0 ** math.floor(math.log10(top / 4))
    return next((size * factor for factor in (1, 2, 2.5, 5) if top / (size * factor) <= 6), size * 10)


def _color(server: int) -> str:
    return _COLORS[server % len(_COLORS)]
