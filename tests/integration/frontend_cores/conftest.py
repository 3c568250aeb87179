from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.core import FakeCore
from tests.integration.frontend_cores.support import open_cores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tercet_frontend.cores import StaticCores


@pytest.fixture
async def core() -> AsyncIterator[FakeCore]:
    async with FakeCore() as core:
        yield core


@pytest.fixture
async def cores(core: FakeCore) -> AsyncIterator[StaticCores]:
    async with open_cores(core.address) as cores:
        await cores.wait_until_ready()
        yield cores
