from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tercet_frontend.cores import CorePool, StaticCores, StreamOptions
from tercet_frontend.cores.interface import GenerationRequest
from tercet_frontend.routing import routing_policy
from tercet_shared.sampling_params import SamplingParams
from tests.fakes.core import TIMEOUT, ids_column

if TYPE_CHECKING:
    from tercet_frontend.cores.generation import StreamGeneration
    from tercet_frontend.cores.interface import Finished


def request(*prompt: int, request_id: str = "r", **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**({"max_tokens": 100} | sampling))
    return GenerationRequest(
        request_id=request_id, model="model", prompt_ids=ids_column(prompt or (1, 2, 3)), params=params
    )


async def collect(generation: StreamGeneration) -> tuple[list[int], Finished]:
    """All tokens of a choice, to its end."""
    ids: list[int] = []
    async with asyncio.timeout(TIMEOUT):
        while True:
            tokens = await generation.next()
            ids += tokens.ids
            if tokens.finished is not None:
                return ids, tokens.finished


async def until(cores: CorePool, condition: Callable[[], object]) -> None:
    """Waits for a condition on the state of the streams."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await cores.wait_for_change()


@asynccontextmanager
async def open_cores(*addresses: str, **options: Any) -> AsyncIterator[StaticCores]:
    """Running `StaticCores`; ``options`` are of `StreamOptions`. It must end within the timeout when stopped."""
    cores = StaticCores(
        addresses,
        names=["model"],
        tokenizer_fingerprint="tokenizer",
        policy=routing_policy("least_loaded"),
        options=StreamOptions(**({"heartbeat_timeout": 20.0, "backoff_first": 0.01, "backoff_limit": 0.1} | options)),
        frontend_id="frontend",
    )
    run = asyncio.create_task(cores.run())
    try:
        yield cores
    finally:
        cores.stop()
        async with asyncio.timeout(TIMEOUT):
            await run
