"""A collector for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.otlp import Collector


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
    with Collector() as running:
        yield running
