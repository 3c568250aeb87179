"""Keys, a clock and a Redis for the tests of this directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from tercet_frontend.access.keys import ApiKey
from tests.fakes.redis_server import RedisServer, redis_server


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def hash_of(key: str) -> str:
    return "sha256:" + sha256(key.encode()).hexdigest()


def make_key(name: str = "alice", **fields: Any) -> ApiKey:
    return ApiKey.model_validate({"name": name, "hash": hash_of(name)} | fields)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server
