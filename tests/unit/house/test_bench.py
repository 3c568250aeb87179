"""The load generator measures what a server does, and refuses what is not a full answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.serve import Load, Server, measure, percentile

LOAD = Load(concurrency=2, input=3, output=4, requests=5, vocabulary=range(10, 20))


@asynccontextmanager
async def answering(tokens: int, *, chunked: bool, done: bool = True) -> AsyncIterator[tuple[Server, list[dict]]]:  # type: ignore[type-arg]
    """A server that streams ``tokens`` tokens whatever is asked; yields it and the requests' bodies."""
    bodies: list[dict[str, object]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "m"}]}')
        else:
            size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line)
            bodies.append(json.loads(await reader.readexactly(size)))
            events = [json.dumps({"choices": [{"text": "x"}], "usage": None}) for _ in range(tokens)]
            events.append(json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}))
            events += ["[DONE]"] if done else []
            kind = b"Transfer-Encoding: chunked\r\n" if chunked else b""
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n")
            for event in events:
                data = f"data: {event}\n\n".encode()
                writer.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            writer.write(b"0\r\n\r\n" if chunked else b"")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None), bodies


@pytest.mark.parametrize("chunked", [True, False])
async def test_every_request_is_new_and_every_token_is_counted(chunked: bool) -> None:
    async with answering(4, chunked=chunked) as (server, bodies):
        result = await measure({"server": server, "peer": server}, LOAD, rounds=2, seed=1)
    assert len(bodies) == 2 * 2 * LOAD.requests
    prompts = {tuple(body["prompt"]) for body in bodies}
    assert len(prompts) == 2 * LOAD.requests  # the peer gets the same ones
    assert all(len(prompt) == 3 and set(prompt) <= set(LOAD.vocabulary) for prompt in prompts)
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in bodies} == {("m", 4, True)}
    figures = result["server"]
    assert isinstance(figures, dict)
    assert figures["events_per_token"] == 1.0
    assert figures["output_tokens_per_s"] > 0
    assert set(figures) == set(result["ratio"])  # type: ignore[call-overload]


@pytest.mark.parametrize(("tokens", "done"), [(3, True), (4, False)])
async def test_a_short_or_unfinished_answer_is_an_error(tokens: int, done: bool) -> None:
    async with answering(tokens, chunked=False, done=done) as (server, _):
        with pytest.raises(RuntimeError, match="the stream ended after"):
            await server.complete([1, 2, 3], 4)


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_percentile_is_the_smallest_value_that_covers_the_share(values: list[float], share: float) -> None:
    value = percentile(values, share)
    assert sum(v <= value for v in values) >= math.ceil(share * len(values))
    assert sum(v < value for v in values) < math.ceil(share * len(values))
