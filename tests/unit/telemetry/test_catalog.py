"""``docs/observability.md`` names every metric that is exported, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet_core.metrics import CoreMetrics, observe_registry
from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.telemetry.live import LiveStats
from tercet_frontend.telemetry.metrics import observe_edge
from tercet_frontend.telemetry.requests import RequestTelemetry
from tercet_shared.telemetry.instruments import Description, Kind, Meter
from tercet_shared.telemetry.tracing import Tracing
from tercet_worker.telemetry.metrics import WorkerMetrics

NONE = "–"  # noqa: RUF001  # as on the page
DOCS = Path(__file__).parents[3] / "docs" / "observability.md"


class NoCore:
    def current_scheduler(self) -> None:
        return None

    def outbox_rows(self) -> int:
        return 0

    def num_front_ends(self) -> int:
        return 0

    def has_worker(self) -> bool:
        return False


class NotRegistered:
    healthy = False
    failures = 0


def frontend(meter: Meter) -> None:
    occupancy = Occupancy()
    RequestTelemetry(meter, Tracing(), LiveStats(occupancy))
    observe_edge(meter, occupancy, lambda: 0)


def meters() -> dict[str, Meter]:
    made = {"Front end": Meter(), "Core": Meter(), "Worker": Meter()}
    frontend(made["Front end"])
    CoreMetrics(made["Core"], NoCore())
    observe_registry(made["Core"], NotRegistered())
    WorkerMetrics(made["Worker"])
    return made


def row(what: Description) -> str:
    labels = ", ".join(f"`{label}`" for label in what.labels) or NONE
    unit = f"`{what.unit}`" if what.unit else NONE
    return f"| `{what.name}` | {what.kind.value} | {unit} | {labels} | {what.text} |"


def section(title: str) -> list[str]:
    text = DOCS.read_text(encoding="utf-8")
    _, _, rest = text.partition(f"### {title}\n")
    table = rest.lstrip().split("\n\n")[0]
    return table.splitlines()[2:]


@pytest.mark.parametrize("service", ["Front end", "Core", "Worker"])
def test_the_page_names_what_there_is(service: str) -> None:
    assert section(service) == [row(what) for what in meters()[service].descriptions()]


def test_nothing_is_called_the_same_in_two_services() -> None:
    names = [what.name for meter in meters().values() for what in meter.descriptions()]
    assert len(names) == len(set(names))


def test_units_and_sentences() -> None:
    for meter in meters().values():
        for what in meter.descriptions():
            assert what.text.endswith("."), what.name
            assert what.unit in {"", "s", "By"} or (what.unit[0], what.unit[-1]) == ("{", "}"), what.name
            if what.kind is Kind.HISTOGRAM and what.name.endswith(("duration", "gap")):
                assert what.unit == "s", what.name


def test_nothing_breaks_before_anything_is_known() -> None:
    for meter in meters().values():
        for reading in meter.collect():
            assert all(number == 0 for _, number in reading.numbers), reading.description.name
