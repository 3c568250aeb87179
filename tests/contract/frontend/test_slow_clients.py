"""Clients that take what they asked for slowly, or not at all: none of them holds anything for ever."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.access.connection import ConnectionLimits
from tests.contract.frontend.conftest import EOS, TIMEOUT, FrontEnd, events, running
from tests.contract.frontend.test_limits import connections, still_answers, until
from tests.contract.frontend.wire import CHAT, body, request
from tests.fakes.core import STOP, FakeCore, scored

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText


def _unread() -> socket.socket:
    """Returns a socket of a client that has room for little: what it does not read stays with the server."""
    client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    return client


async def _never_reads(front_end: FrontEnd, payload: dict[str, Any]) -> socket.socket:
    # Nor has the system much room for what the server sends; connections have it from where they are accepted.
    front_end.server._listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    client = _unread()
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", int(front_end.url.rpartition(":")[2])))
    await loop.sock_sendall(client, request(payload=payload))
    return client


async def test_a_client_that_never_reads_is_cut_and_delays_nobody(text: ModelText) -> None:
    limits = ConnectionLimits(client_timeout=0.5)
    async with FakeCore() as core, running(text, [core], limits=limits) as front_end:
        stuck_client = await _never_reads(front_end, body(stream=True, max_tokens=1_000))
        stuck = await core.next_request()
        sending = True

        async def flood() -> None:
            """A long answer, in events of some hundred kilobytes, until it is given up."""
            while sending and not stuck.aborted:
                stuck.send(*text.tokenizer.encode("Paris is nice. " * 400))
                await front_end.http.get("/livez")

        flooding = asyncio.create_task(flood())
        async with front_end.http.stream("POST", CHAT, json=body(stream=True)) as response:
            beside = await core.next_request()
            for _ in range(20):
                beside.send(100)
            beside.send(EOS, finish=STOP, stop_id=EOS)
            *_, last, done = await events(response)
        assert orjson.loads(last)["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        await core.wait_for(lambda: stuck.aborted)
        sending = False
        await flooding
        stuck_client.close()
        await still_answers(front_end)
        assert front_end.admission.occupancy.running == 0


async def test_a_whole_answer_that_nobody_takes(text: ModelText) -> None:
    limits = ConnectionLimits(client_timeout=0.3)
    async with FakeCore() as core, running(text, [core], limits=limits) as front_end:
        await still_answers(front_end)  # keeps a connection
        client = await _never_reads(front_end, body(logprobs=True, top_logprobs=20, max_tokens=2_000))
        waiting = await core.next_request()
        assert front_end.server.connections == 2
        ids = text.tokenizer.encode("Paris is nice. " * 400)[:1_999]
        scores = [scored(position, token, 20) for position, token in enumerate([*ids, EOS])]
        core.step([waiting.row(*ids, EOS, finish=STOP, stop_id=EOS, scores=scores)])
        # Nothing is left of it, though the client is still there.
        await until(front_end, lambda: front_end.server.connections == 1)
        client.close()


async def test_a_client_that_reads_slowly_is_not_cut(text: ModelText) -> None:
    limits = ConnectionLimits(client_timeout=3_600.0)
    async with FakeCore() as core, running(text, [core], limits=limits) as front_end:
        client = await _never_reads(front_end, body(stream=True, max_tokens=1_000))
        waiting = await core.next_request()
        (connection,) = connections(front_end)
        for _ in range(40):
            waiting.send(*text.tokenizer.encode("Paris is nice. " * 4_000))
        waiting.send(EOS, finish=STOP, stop_id=EOS)
        loop = asyncio.get_running_loop()
        got = b""
        async with asyncio.timeout(TIMEOUT):
            for _ in range(5):  # as often its time is over just when the server has got rid of a little
                await until(front_end, lambda: connection._sending is not None)
                watch, unsent = connection._sending, connection._unsent
                while connection._sending is watch and connection.transport.get_write_buffer_size() >= unsent:
                    got += await loop.sock_recv(client, 500)
                    await front_end.http.get("/livez")
                if connection._sending is watch:
                    watch.cancel()
                    connection._not_taken()
                assert not connection.transport.is_closing()
            while not got.endswith(b"0\r\n\r\n"):
                piece = await loop.sock_recv(client, 1_000_000)
                assert piece, f"cut after {len(got)} bytes"
                got += piece
        assert b"data: [DONE]" in got
        client.close()
