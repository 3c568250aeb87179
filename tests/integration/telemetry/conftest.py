"""A collector for the tests of this directory, to which everything is delivered however long that takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tercet_shared.telemetry import telemetry
from tests.fakes.otlp import TIMEOUT, Collector


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
    # A service drops what it cannot deliver within a second of its end, which is not much on a busy machine.
    monkeypatch.setattr(telemetry, "CLOSE_S", TIMEOUT)
    with Collector() as running:
        yield running
