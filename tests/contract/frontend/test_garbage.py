"""No request leaves anything to the garbage collector, which therefore need not run often."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.contract.frontend.conftest import MODEL, TIMEOUT, FrontEnd, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tercet_frontend.tokenizing import ModelText

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/chat/completions", {"messages": MESSAGES}),
    "streamed": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    "several choices": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "n": 3}),
    "stop string": ("/v1/completions", {"prompt": "Hi", "stream": True, "stop": ["n"]}),
    "wrong field": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": "hot"}),
    "too long": ("/v1/completions", {"prompt": "word " * 4_000}),
    "large": ("/v1/chat/completions", {"messages": MESSAGES * 600, "max_tokens": "many"}),
    "no such path": ("/v1/nothing", {}),
    "responses": ("/v1/responses", {"input": "Hi", "stream": True, "store": False}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stream": True}),
    "tokenize": ("/tokenize", {"prompt": "Hi"}),
}
REPEATS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front_end(text: ModelText, says: Any) -> AsyncIterator[FrontEnd]:
    async with FakeCore(outputs=says("Fine.")) as core, running(text, [core]) as front_end:
        yield front_end


async def _ask(front_end: FrontEnd, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front_end.url.rpartition(":")[2]))
    writer.write(request)
    async with asyncio.timeout(TIMEOUT):
        assert (await reader.read()).startswith(b"HTTP/1.1 ")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("kind", REQUESTS)
async def test_what_a_request_held_goes_with_it(front_end: FrontEnd, kind: str) -> None:
    path, fields = REQUESTS[kind]
    body = json.dumps({"model": MODEL} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    await _ask(front_end, request)  # what is made once is made now
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            await _ask(front_end, request)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        # The rest is asyncio's own (uvloop's connections leave none) and the pollution of other tests.
        left = Counter(
            name
            for thing in gc.garbage
            if (name := f"{type(thing).__module__}.{type(thing).__qualname__}").startswith(
                ("tercet_", "starlette.", "fastapi.", "uvicorn.", "contextlib.", "_asyncio.", "builtins.coroutine")
            )
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert sum(left.values()) < REPEATS, left
