"""A Redis server for the tests of this directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server
