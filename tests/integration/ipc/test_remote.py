"""Links between hosts, on real gRPC: joining, peers that do not know how to, and peers that go."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest

from tercet_proto.v1 import link_pb2 as pb
from tercet_proto.v1 import link_pb2_grpc as pb_grpc
from tercet_shared.config import Common
from tercet_shared.errors import ConfigurationError, ProtocolError
from tercet_shared.ipc import connect_remote as joining
from tercet_shared.ipc.connect_remote import connect_remote
from tercet_shared.ipc.errors import LinkRejectedError, LinkUnavailableError
from tercet_shared.ipc.link import CloseKind, CloseReason, FrameLink, Stream
from tercet_shared.ipc.remote_listener import RemoteListener
from tercet_shared.ipc.settings import HeartbeatSettings, ListenerSettings, RingSettings
from tercet_shared.mtls import mutual_tls
from tests.fakes.certificates import Authority

from .conftest import CALM, PATIENCE_S, Collector, Core, Pair, Peer, attaching, linked, small

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

STEPS, MASKS = pb.LINK_STREAM_KIND_STEPS, pb.LINK_STREAM_KIND_MASKS


async def closed(link: FrameLink) -> CloseReason:
    async with asyncio.timeout(PATIENCE_S):
        return await link.wait_closed()


@pytest.fixture
async def pair(path: Path) -> AsyncIterator[Pair]:
    async with linked("grpc", path) as pair:
        yield pair


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[Any]:
    """A call as a worker would make it, whose messages are the test's."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield pb_grpc.WorkerLinkStub(channel).Attach()  # type: ignore[no-untyped-call]  # generated


async def answer(call: Any) -> pb.LinkMessage:
    async with asyncio.timeout(PATIENCE_S):
        message = await call.read()
    assert isinstance(message, pb.LinkMessage)
    return message


async def goodbye(call: Any) -> str:
    """The reason with which the core ends the link; what comes before is dropped."""
    while not (message := await answer(call)).HasField("goodbye"):
        pass
    return message.goodbye


def opening(hello: bytes = b"?", version: int = 1) -> pb.LinkMessage:
    return pb.LinkMessage(open=pb.LinkOpen(version=version, hello=hello))


async def check_others_can_join(core: Core, address: str) -> None:
    joined = await connect_remote(address, b"an honest worker")
    assert joined.reply == b"welcome, an honest worker"
    assert (await core.connection()).close_reason is None
    await joined.connection.close()


async def test_a_refused_worker_learns_why() -> None:
    async with attaching() as (core, address):
        core.refuse[b"old worker"] = "protocol version 1 is too old; this core speaks 2"
        with pytest.raises(LinkRejectedError, match="protocol version 1 is too old; this core speaks 2"):
            await connect_remote(address, b"old worker")
        await check_others_can_join(core, address)


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        (pb.LinkMessage(), "did not begin with a hello"),
        (pb.LinkMessage(parts=[pb.LinkPart(stream=STEPS, data=b"x")]), "did not begin with a hello"),
        (opening(version=9), "version 9"),
        (opening(bytes(1001)), "the hello has 1001 bytes; the limit is 1000"),
    ],
)
async def test_who_does_not_know_how_to_join_is_told_so(first: pb.LinkMessage, complaint: str) -> None:
    async with attaching(small(max_hello=1000)) as (core, address):
        async with calling(address) as call:
            await call.write(first)
            message = await answer(call)
            assert complaint in message.reject
            assert await call.read() is grpc.aio.EOF
        assert core.hellos == []
        await check_others_can_join(core, address)


async def test_a_hello_that_never_comes_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with attaching(small(handshake_timeout_s=0.05)) as (core, address):
        async with calling(address) as call:
            assert await call.read() is grpc.aio.EOF
        assert "its handshake took longer than 0.05 s" in caplog.text
        assert core.hellos == []


async def test_handshakes_at_once_are_bounded() -> None:
    async with attaching(small(max_handshakes=2)) as (core, address):
        async with calling(address) as first, calling(address) as second:
            for call in (first, second):
                await call.initial_metadata()  # the core has begun with it; a connection alone does not say so
            with pytest.raises(LinkUnavailableError, match="too many workers attach at once"):
                await connect_remote(address, b"third")
            await first.write(opening(b"first"))
            assert (await answer(first)).HasField("accept")
            await core.connection()  # with which its handshake is over
            await check_others_can_join(core, address)


async def test_a_handshake_that_was_given_up_has_left_its_place() -> None:
    async with attaching(small(max_handshakes=1)) as (core, address):
        for _ in range(2):
            async with calling(address) as call:
                await call.initial_metadata()
                await call.done_writing()  # there will be no hello
                assert await call.read() is grpc.aio.EOF
        await check_others_can_join(core, address)


async def test_one_who_is_turned_away_may_have_left() -> None:
    class Gone:
        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise grpc.aio.InternalError  # as of a call that is over

    core = Core()
    context: Any = Gone()
    await RemoteListener(core.on_hello, core.on_connection, small(max_handshakes=0)).Attach(None, context)
    assert core.hellos == []


async def test_a_reply_that_is_too_large_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    async with attaching() as (core, address):
        core.reply = bytes((1 << 20) + 1)
        with pytest.raises(LinkUnavailableError, match="ended the call"):
            await connect_remote(address, b"")
        assert "the limit is 1048576" in caplog.text


async def test_streams_that_make_no_sense_end_the_link() -> None:
    rubbish = [
        (opening(), "has no place on an open link"),
        (pb.LinkMessage(reject="no"), "has no place on an open link"),
        (pb.LinkMessage(parts=[pb.LinkPart(stream=MASKS, data=b"x")]), "a frame of stream 2, which it does not send"),
        (pb.LinkMessage(parts=[pb.LinkPart(data=b"x")]), "a frame of stream 0"),
        (pb.LinkMessage(parts=[pb.LinkPart(stream=STEPS, data=bytes(9000))] * 9), "under way; the limit is 65536"),
        (pb.LinkMessage(parts=[pb.LinkPart(stream=STEPS, data=b"x", rest=1 << 40)]), "is over the limit of 1048576"),
        (pb.LinkMessage(consumed=[pb.LinkConsumed(stream=STEPS, bytes=1)]), "consumed 1 bytes, which were not sent"),
        (pb.LinkMessage(consumed=[pb.LinkConsumed(stream=7, bytes=1)]), "consumed of stream 7"),
    ]
    async with attaching() as (core, address):
        for message, complaint in rubbish:
            async with calling(address) as call:
                await call.write(opening())
                assert (await answer(call)).accept.reply == b"welcome, ?"
                link = await core.connection()
                link.on_frames(Collector())
                await call.write(message)
                assert complaint in await goodbye(call)
                reason = await closed(link)
                assert reason.kind is CloseKind.PROTOCOL
                assert complaint in reason.text


async def test_frames_are_kept_until_somebody_wants_them_and_hold_back_the_sender(pair: Pair) -> None:
    frames = [bytes([number]) * 5000 for number in range(60)]
    for frame in frames:
        pair.worker.send(frame)
    assert pair.worker.pending() > 40
    results = Collector()
    pair.core.on_frames(results)
    pair.core.send(b"masks go on", Stream.MASKS)
    masks = Collector()
    pair.worker.on_frames(masks, Stream.MASKS)
    assert await masks.until(1) == [b"masks go on"]
    assert await results.until(60) == frames
    assert pair.worker.pending() == 0
    with pytest.raises(RuntimeError, match="started before"):
        pair.core.on_frames(results)


async def test_what_was_said_before_a_goodbye_is_heard_by_who_has_just_begun_to_listen(pair: Pair) -> None:
    results = Collector()
    pair.core._take(pb.LinkMessage(parts=[pb.LinkPart(stream=STEPS, data=b"the last result")]))
    pair.core.on_frames(results)
    pair.core._take(pb.LinkMessage(goodbye="over"))  # in the same turn of the loop
    assert results.frames == [b"the last result"]
    assert pair.core.close_reason == CloseReason(CloseKind.GOODBYE, "over")


async def test_a_worker_that_does_not_read_is_noticed_by_its_silence_and_left_behind() -> None:
    async with attaching(small(HeartbeatSettings(0.1, 0.5))) as (core, address), calling(address) as call:
        await call.write(opening())
        link = await core.connection()
        for _ in range(200):
            link.send(bytes(30_000))
        reason = await closed(link)
        assert reason.kind is CloseKind.HEARTBEAT_LOST
        assert "has shown no life" in reason.text
        assert link.pending() == 0
        await link.close()
        assert "has shown no life" in await goodbye(call)


async def test_heartbeats_keep_an_idle_link(path: Path) -> None:
    async with linked("grpc", path, small(HeartbeatSettings(0.05, 5.0))) as pair:
        read, beats = pair.core._wire.read, 0
        heard = asyncio.Event()

        async def counted() -> pb.LinkMessage | None:
            nonlocal beats
            message: pb.LinkMessage | None = await read()
            beats += message is not None and not message.ByteSize()
            if beats == 10:
                heard.set()
            return message

        pair.core._wire.read = counted
        async with asyncio.timeout(PATIENCE_S):
            await heard.wait()
        assert pair.core.close_reason is pair.worker.close_reason is None
        assert pair.worker._heartbeat == HeartbeatSettings(0.05, 5.0)


@pytest.fixture(params=["asyncio", "uvloop"])
def peer_loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_worker_process_that_is_killed_is_noticed_by_its_connection(peer_loop: str) -> None:
    async with attaching() as (core, address):
        with Peer("attach", address, peer_loop) as worker:
            link = await core.connection()
            results = Collector()
            link.on_frames(results)
            big = bytes(range(256)) * 4000
            link.send(b"plan")
            link.send(big)
            link.send(b"1", Stream.MASKS)
            assert sorted(await results.until(3), key=len) == [b"plan", b"mask 1", big]
            worker.process.kill()
            reason = await closed(link)  # heartbeats are 30 s apart
        assert reason.kind is CloseKind.PEER_DIED
        assert "the worker is gone" in reason.text


async def test_a_stopped_worker_is_noticed_by_its_silence_and_learns_of_it_later(peer_loop: str) -> None:
    async with attaching(small(HeartbeatSettings(0.2, 1.0))) as (core, address):
        with Peer("attach", address, peer_loop) as worker:
            link = await core.connection()
            assert await worker.line() == "joined"
            worker.process.send_signal(signal.SIGSTOP)
            reason = await closed(link)
            assert reason.kind is CloseKind.HEARTBEAT_LOST
            worker.process.send_signal(signal.SIGCONT)
            line = await worker.line()
            assert line.startswith("closed: goodbye: the worker has shown no life")


async def test_a_worker_notices_that_its_core_is_gone() -> None:
    core = Core()
    server = grpc.aio.server()
    pb_grpc.add_WorkerLinkServicer_to_server(RemoteListener(core.on_hello, core.on_connection, small()), server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    joined = await connect_remote(f"127.0.0.1:{port}", b"?")
    link = await core.connection()  # the worker may have its answer before the core knows that it is sent
    await server.stop(grace=None)  # which cancels the call: as for the worker, the core is gone
    reason = await closed(joined.connection)
    assert reason.kind is CloseKind.PEER_DIED
    assert "the core is gone" in reason.text
    assert (await closed(link)).kind is CloseKind.PEER_DIED
    await joined.connection.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
async def test_an_address_that_cannot_be(address: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an address"):
        await connect_remote(address, b"")


async def test_a_worker_without_a_core_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(LinkUnavailableError, match="no core can be reached at 127"):
        await connect_remote("127.0.0.1:1", b"")
    with pytest.raises(LinkUnavailableError, match="no core can be reached at unix:"):
        await connect_remote(f"unix:{tmp_path}/none", b"")


async def test_what_takes_no_workers_is_no_core() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(ProtocolError, match="takes no workers"):
        await connect_remote(f"127.0.0.1:{port}", b"")
    await server.stop(None)


class Interrupted:
    """A stub whose first call ends in the very moment of sending, as gRPC tells it."""

    def __init__(self) -> None:
        self.calls = 0

    def Attach(self) -> Interrupted:  # noqa: N802
        self.calls += 1
        return self

    async def write(self, message: pb.LinkMessage) -> None:
        if self.calls == 1:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
            )

    async def read(self) -> pb.LinkMessage:
        return pb.LinkMessage(reject="not you")


async def test_a_hello_that_meets_the_end_of_its_call_is_said_again() -> None:
    stub = Interrupted()
    _, answer = await joining._say_hello(cast("Any", stub), pb.LinkMessage())
    assert answer == pb.LinkMessage(reject="not you")
    assert stub.calls == 2


class Scripted(pb_grpc.WorkerLinkServicer):
    """Answers a hello with what the test says, or never."""

    def __init__(self, *messages: pb.LinkMessage) -> None:
        self._messages = messages

    async def Attach(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        await context.read()
        for message in self._messages:
            await context.write(message)
        if not self._messages:
            await asyncio.Event().wait()


@asynccontextmanager
async def false_core(*messages: pb.LinkMessage) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_WorkerLinkServicer_to_server(Scripted(*messages), server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def accept(interval: float = 1.0, window: int = 4096, max_frame: int = 1) -> pb.LinkMessage:
    limits = pb.LinkStream(window=window, max_frame=max_frame)
    return pb.LinkMessage(
        accept=pb.LinkAccept(
            heartbeat_interval_s=interval, heartbeat_timeout_s=3.0, plan=limits, result=limits, mask=limits
        )
    )


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.LinkMessage(), "neither yes nor no"),
        (pb.LinkMessage(goodbye="?"), "neither yes nor no"),
        (accept(interval=float("nan")), "settings cannot be used"),
        (accept(window=4095), "a window of 4095"),
        (accept(max_frame=0), "frames of 0 bytes"),
    ],
)
async def test_an_answer_that_makes_no_sense(message: pb.LinkMessage, complaint: str) -> None:
    async with false_core(message) as address:
        with pytest.raises(ProtocolError, match=complaint):
            await connect_remote(address, b"")


async def test_a_core_that_does_not_answer_is_given_up() -> None:
    async with false_core() as address:
        with pytest.raises(LinkUnavailableError, match=r"did not answer within 0\.05 s"):
            await connect_remote(address, b"", timeout_s=0.05)


async def test_a_core_that_accepts_and_goes() -> None:
    async with false_core(accept()) as address:
        link = (await connect_remote(address, b"")).connection
        reason = await closed(link)
        assert reason.kind is CloseKind.PEER_DIED
        await link.close()


async def test_only_workers_with_a_certificate_may_attach(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    issuers = authority.certificate.chain

    def tls(certificate: Any, ca: Path = issuers) -> Any:
        return mutual_tls(Common(mtls_cert=certificate.chain, mtls_key=certificate.key, mtls_ca=ca))

    async with attaching(credentials=tls(authority.issue("core")).server_credentials()) as (core, address):
        own = tls(authority.issue("worker"))
        for strange in (None, tls(other.issue("strange")), tls(authority.issue("deceived"), other.certificate.chain)):
            with pytest.raises(LinkUnavailableError, match="no core can be reached"):
                await connect_remote(address, b"?", strange)
        with pytest.raises(LinkUnavailableError):
            await connect_remote(address, b"?", own, tls_name="elsewhere")
        for name in (None, "localhost"):
            joined = await connect_remote(address, b"?", own, tls_name=name)
            assert joined.reply == b"welcome, ?"
            await joined.connection.close()
        assert len(core.hellos) == 2


async def test_nothing_is_left_running() -> None:
    async with attaching() as (core, address):
        for number in range(3):
            worker = (await connect_remote(address, b"")).connection
            link = await core.connection()
            link.on_frames(Collector())
            worker.on_frames(Collector())
            for _ in range(20):
                link.send(bytes(10_000))
            ending, other = (worker, link) if number % 2 else (link, worker)
            await ending.close()
            await closed(other)
            await other.close()
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("link to the ")]


async def test_closing_does_not_wait_for_one_who_never_reads() -> None:
    settings = ListenerSettings(plan=RingSettings(capacity=64 << 20), heartbeat=CALM)  # more than gRPC keeps for a call
    async with attaching(settings) as (core, address), calling(address) as call:
        await call.write(opening())
        link = await core.connection()
        for _ in range(100):
            link.send(bytes(500_000))
        async with asyncio.timeout(PATIENCE_S):
            await link.close("enough")
        assert link.close_reason == CloseReason(CloseKind.LOCAL, "enough")
