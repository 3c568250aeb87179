"""Joining, and peers that do not know how to."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tercet_shared.errors import ConfigurationError, ProtocolError
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.control import (
    ACCEPT_BODY,
    HEADER,
    Kind,
    decode_header,
    decode_text,
    encode,
    receive_exactly,
    receive_with_descriptors,
)
from tercet_shared.ipc.errors import CorruptRingError, LinkClosedError, LinkRejectedError, LinkUnavailableError
from tercet_shared.ipc.listener import LinkListener
from tercet_shared.ipc.settings import HeartbeatSettings

from .conftest import PATIENCE_S, Core, serving, small

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


async def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(str(path))
    return sock


async def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                received += await receive_exactly(sock, 1)
            except (LinkClosedError, ConnectionResetError):
                sock.close()
                return received


async def check_others_can_join(core: Core, path: Path) -> None:
    joined = await connect(path, b"an honest worker")
    assert joined.reply == b"welcome, an honest worker"
    assert (await core.connection()).close_reason is None
    await joined.connection.close()


def rejection(answer: bytes) -> str:
    kind, length = decode_header(answer[: HEADER.size])
    assert kind is Kind.REJECT
    assert len(answer) == HEADER.size + length
    return decode_text(answer[HEADER.size :])


@pytest.mark.parametrize("size", [0, 1, 64 * 1024])
async def test_hello_and_reply_are_opaque_bytes(path: Path, size: int) -> None:
    hello = os.urandom(size)
    async with serving(path) as core:
        joined = await connect(path, hello)
        assert joined.reply == b"welcome, " + hello
        assert core.hellos == [hello]
        await joined.connection.close()


async def test_a_refused_worker_learns_why(path: Path, descriptors: Callable[[], set[str]]) -> None:
    async with serving(path) as core:
        before = descriptors()
        core.refuse[b"old worker"] = "protocol version 1 is too old; this core speaks 2"
        with pytest.raises(LinkRejectedError, match="protocol version 1 is too old; this core speaks 2"):
            await connect(path, b"old worker")
        await check_others_can_join(core, path)
        await core.close_connections()
        assert not descriptors() - before


async def test_a_judge_that_raises_refuses(path: Path) -> None:
    def judge(hello: bytes) -> None:
        raise ProtocolError("this hello is not MessagePack")

    with LinkListener(path, small()) as listener:
        task = asyncio.create_task(listener.serve(judge, lambda *_: None))  # type: ignore[arg-type]  # never returns
        with pytest.raises(LinkRejectedError, match="not MessagePack"):
            await connect(path, b"?")
        task.cancel()
        await asyncio.wait([task])


async def test_garbage_is_closed_and_logged_and_others_join(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(path) as core:
        sock = await dial(path)
        sock.send(b"GET / HTTP/1.1\r\nHost: core\r\n\r\n")
        assert "does not speak the link protocol" in rejection(await read_to_end(sock))
        assert "does not speak the link protocol" in caplog.text
        assert core.hellos == []
        await check_others_can_join(core, path)


async def test_another_version_is_told_so(path: Path) -> None:
    async with serving(path):
        sock = await dial(path)
        message = bytearray(encode(Kind.HELLO))
        message[2] = 9
        sock.send(message)
        assert "version 9" in rejection(await read_to_end(sock))


async def test_the_conversation_begins_with_a_hello(path: Path) -> None:
    async with serving(path):
        sock = await dial(path)
        sock.send(encode(Kind.GOODBYE, b"?"))
        assert "began with GOODBYE" in rejection(await read_to_end(sock))


async def test_a_hello_that_is_too_large_is_refused_unread(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(path, small(max_hello=1000)) as core:
        # Far more than the socket takes at once: the worker still sends when the core has already refused.
        with pytest.raises(LinkRejectedError, match="the hello has 5000000 bytes; the limit is 1000"):
            await connect(path, bytes(5_000_000))
        assert "the limit is 1000" in caplog.text
        assert core.hellos == []
        await check_others_can_join(core, path)


@pytest.mark.parametrize("beginning", [b"", encode(Kind.HELLO, bytes(100))[:5], encode(Kind.HELLO, bytes(100))[:50]])
async def test_a_hello_that_never_comes_is_given_up(
    path: Path, beginning: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path, small(handshake_timeout_s=0.05)):
        sock = await dial(path)
        sock.send(beginning)
        assert await read_to_end(sock) == b""
        assert "its handshake took longer than 0.05 s" in caplog.text


async def test_silent_peers_do_not_keep_a_worker_out(path: Path) -> None:
    async with serving(path, small(max_handshakes=3)) as core:
        silent = [await dial(path) for _ in range(2)]
        await check_others_can_join(core, path)
        for sock in silent:
            sock.close()


async def test_handshakes_at_once_are_bounded_and_the_rest_waits(path: Path) -> None:
    async with serving(path, small(max_handshakes=2, handshake_timeout_s=0.1)) as core:
        silent = [await dial(path) for _ in range(6)]
        await check_others_can_join(core, path)  # after the silent ones before it were given up
        for sock in silent:
            assert await read_to_end(sock) == b""


async def test_a_peer_that_dies_in_the_middle_of_its_hello_troubles_nobody(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path) as core:
        sock = await dial(path)
        sock.send(encode(Kind.HELLO, bytes(100))[:50])
        sock.close()
        await check_others_can_join(core, path)
        assert "middle of a message" in caplog.text


async def test_stopping_ends_handshakes_in_progress(path: Path, descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()
    async with serving(path):
        sock = await dial(path)
        sock.send(encode(Kind.HELLO, bytes(100))[:50])
        await asyncio.sleep(0)
    assert await read_to_end(sock) == b""
    assert not descriptors() - before


async def test_a_core_out_of_descriptors_goes_on_when_there_are_some(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2
    accept = socket.socket.accept

    def failing(sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr("tercet_shared.ipc.listener._ACCEPT_RETRY_S", 0.001)
    monkeypatch.setattr(socket.socket, "accept", failing)
    async with serving(path) as core:
        await check_others_can_join(core, path)
    assert caplog.text.count("cannot be accepted now: Too many open files") == 2


async def test_a_core_that_cannot_make_rings_closes_that_worker_and_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    real, left = os.eventfd, [3]

    def scarce(value: int, flags: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(value, flags)

    async with serving(path) as core:
        before = descriptors()
        monkeypatch.setattr(os, "eventfd", scarce)
        with pytest.raises(LinkUnavailableError):
            await connect(path, b"unlucky")
        monkeypatch.undo()
        assert "Too many open files" in caplog.text
        assert not descriptors() - before
        await check_others_can_join(core, path)


# The worker's side, against cores that are not there or not right.


@asynccontextmanager
async def false_core(path: Path, answer: Callable[[socket.socket], object]) -> AsyncIterator[list[socket.socket]]:
    """Listens at ``path`` and does ``answer`` to whoever connects; gives its ends of the connections."""
    path.parent.mkdir()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    listening.setblocking(False)
    loop = asyncio.get_running_loop()
    accepted: list[socket.socket] = []

    def accept() -> None:
        accepted.append(listening.accept()[0])
        answer(accepted[-1])

    loop.add_reader(listening.fileno(), accept)
    try:
        yield accepted
    finally:
        loop.remove_reader(listening.fileno())
        for sock in (listening, *accepted):
            sock.close()


async def test_a_worker_without_a_core_is_told_so(path: Path, descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()
    with pytest.raises(LinkUnavailableError, match=r"no core can be reached at .*link\.sock: No such file"):
        await connect(path, b"")
    path.parent.mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with pytest.raises(LinkUnavailableError, match="Connection refused"):
        await connect(path, b"")
    assert not descriptors() - before


async def test_a_core_that_does_not_answer_is_given_up(path: Path, descriptors: Callable[[], set[str]]) -> None:
    async with false_core(path, lambda _: None) as accepted:
        before = descriptors()
        with pytest.raises(LinkUnavailableError, match=r"did not answer within 0\.05 s"):
            await connect(path, b"", timeout_s=0.05)
        assert len(descriptors() - before) == len(accepted)


async def test_a_core_that_goes_away_instead_of_answering(path: Path) -> None:
    async with false_core(path, lambda sock: sock.close()):
        with pytest.raises(LinkUnavailableError):
            await connect(path, b"")


ACCEPT_NOTHING = encode(Kind.ACCEPT, ACCEPT_BODY.pack(1.0, 3.0, 0, 0))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"SSH-2.0-OpenSSH_9.2", "does not speak the link protocol"),
        (encode(Kind.HEARTBEAT), "answered a hello with HEARTBEAT"),
        (encode(Kind.ACCEPT), "answered a hello with ACCEPT and 0 bytes"),
        (HEADER.pack(0x5443, 1, Kind.ACCEPT, 0xFFFFFFFF), "4294967295 bytes"),
        (HEADER.pack(0x5443, 1, Kind.REJECT, 0xFFFFFFFF), "4294967295 bytes"),
        (ACCEPT_NOTHING, "passed 0 descriptors instead of 9"),
    ],
)
async def test_an_answer_that_makes_no_sense(path: Path, answer: bytes, complaint: str) -> None:
    async with false_core(path, lambda sock: sock.send(answer)):
        with pytest.raises(ProtocolError, match=complaint):
            await connect(path, b"")


async def test_descriptors_that_are_no_rings_are_refused_and_closed(
    path: Path, descriptors: Callable[[], set[str]]
) -> None:
    async with false_core(path, lambda sock: socket.send_fds(sock, [ACCEPT_NOTHING], [0] * 9)) as accepted:
        before = descriptors()
        with pytest.raises(CorruptRingError, match="sealed"):
            await connect(path, b"")
        assert len(descriptors() - before) == len(accepted)


async def test_settings_that_make_no_sense_are_refused(path: Path) -> None:
    answer = encode(Kind.ACCEPT, ACCEPT_BODY.pack(float("nan"), 3.0, 0, 0))
    async with false_core(path, lambda sock: socket.send_fds(sock, [answer], [0] * 9)):
        with pytest.raises(ProtocolError, match="settings cannot be used"):
            await connect(path, b"")


async def test_descriptors_arrive_close_on_exec_and_too_many_are_refused(descriptors: Callable[[], set[str]]) -> None:
    left, right = socket.socketpair()
    before = descriptors()
    right.setblocking(False)
    socket.send_fds(left, [b"x"], array.array("i", [0, 1]))
    _, received = await receive_with_descriptors(right, 1, 2)
    assert [os.get_inheritable(fd) for fd in received] == [False, False]
    for fd in received:
        os.close(fd)
    socket.send_fds(left, [b"x"], [0] * 20)
    with pytest.raises(ProtocolError, match="not all descriptors"):
        await receive_with_descriptors(right, 1, 1)
    assert not descriptors() - before
    left.close()
    right.close()


async def test_a_worker_takes_the_cores_heartbeat_settings(path: Path) -> None:
    async with serving(path, small(HeartbeatSettings(7.0, 21.0))):
        joined = await connect(path, b"")
        assert joined.connection._heartbeat == HeartbeatSettings(7.0, 21.0)
        await joined.connection.close()


@pytest.mark.parametrize(("interval", "dead_after"), [(0.0, 3.0), (2.0, 3.0), (-1.0, 3.0), (1.0, float("inf"))])
def test_impossible_heartbeats_are_refused(interval: float, dead_after: float) -> None:
    with pytest.raises(ConfigurationError, match="heartbeat"):
        HeartbeatSettings(interval, dead_after)
