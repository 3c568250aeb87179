"""Connecting, losing, refusing and choosing cores."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from tercet_frontend.cores import StaticCores, StreamOptions
from tercet_frontend.cores.interface import Finished, FinishReason, ServedModel, Tokens
from tercet_frontend.cores.stream import CoreState
from tercet_frontend.routing import routing_policy
from tercet_shared.errors import ConfigurationError, UnavailableError
from tercet_shared.mtls import MutualTls
from tests.fakes.certificates import Authority
from tests.fakes.core import STOP, TIMEOUT, FakeCore
from tests.integration.frontend_cores.support import open_cores, request, until

_ROOT = Path(__file__).parents[3]


def build(addresses: list[str], **changes: Any) -> StaticCores:
    arguments: dict[str, Any] = {
        "names": ["model"], "tokenizer_fingerprint": "tokenizer", "policy": routing_policy("least_loaded"),
        "options": StreamOptions(), "frontend_id": "frontend",
    }  # fmt: skip
    return StaticCores(addresses, **(arguments | changes))


async def works(core: FakeCore, cores: StaticCores) -> None:
    """One choice goes through."""
    generation = cores.submit(request())
    (await core.next_request()).send(5, finish=STOP)
    async with asyncio.timeout(TIMEOUT):
        assert await generation.next() == Tokens([5], Finished(FinishReason.STOP, None, 0))


async def fails(generation: Any) -> None:
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(UnavailableError):
            await generation.next()
    with pytest.raises(RuntimeError):  # once only
        await generation.next()


async def test_hello_comes_first(core: FakeCore, cores: StaticCores) -> None:
    connection = await core.connected()
    hello = connection.frames[0].hello
    assert (hello.frontend_id, hello.protocol, hello.oldest_protocol) == ("frontend", 2, 1)
    assert not hello.block_events
    assert cores.models() == [ServedModel("model", 2048, 49_152)]


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    async with FakeCore(f"unix:{tmp_path}/core.sock") as core, open_cores(core.address) as cores:
        await cores.wait_until_ready()
        await works(core, cores)


async def test_over_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    front_end, server = authority.issue("frontend"), authority.issue("core")
    tls = MutualTls(server.chain, server.key, authority.certificate.chain)
    async with FakeCore(credentials=tls.server_credentials()) as core:
        own = MutualTls(front_end.chain, front_end.key, authority.certificate.chain)
        async with open_cores(core.address, tls=own) as cores, open_cores(core.address) as plain:
            await cores.wait_until_ready()
            await works(core, cores)
            await until(plain, lambda: "cannot be reached" in (plain.not_ready_reason() or ""))
        assert len(core.connections) == 1


async def test_the_log_says_why_a_core_cannot_be_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "other"
    other.mkdir()
    authority, stranger = Authority(tmp_path), Authority(other)
    server, front_end = authority.issue("core"), authority.issue("frontend")
    tls = MutualTls(server.chain, server.key, authority.certificate.chain)
    distrustful = MutualTls(front_end.chain, front_end.key, stranger.certificate.chain)
    async with (
        FakeCore(credentials=tls.server_credentials()) as core,
        open_cores(core.address, tls=distrustful) as cores,
        open_cores(f"unix:{tmp_path}/none.sock") as nowhere,
    ):
        await until(cores, lambda: "cannot be reached" in (cores.not_ready_reason() or ""))
        await until(nowhere, lambda: "cannot be reached" in (nowhere.not_ready_reason() or ""))
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert any("CERTIFICATE_VERIFY_FAILED" in each for each in warnings)
    assert any("No such file or directory" in each for each in warnings)
    assert "CERTIFICATE" not in (cores.not_ready_reason() or "")


async def test_a_core_that_comes_later(tmp_path: Path) -> None:
    core = FakeCore(f"unix:{tmp_path}/core.sock")
    async with open_cores(core.address) as cores:
        await until(cores, lambda: "cannot be reached" in (cores.not_ready_reason() or ""))
        assert cores.models() == []
        with pytest.raises(UnavailableError, match="cannot be reached"):
            cores.submit(request())
        async with core:
            await cores.wait_until_ready()
            await works(core, cores)


async def test_a_core_that_dies_and_returns(core: FakeCore, cores: StaticCores) -> None:
    generations = [cores.submit(request(n)) for n in range(3)]
    received = await core.next_requests(3)
    received[0].send(7)
    assert (await generations[0].next()).ids == [7]
    await core.kill()
    await until(cores, lambda: cores.not_ready_reason() is not None)
    with pytest.raises(UnavailableError):  # who is new does not wait
        cores.submit(request())
    await core.start()
    again = {each.prompt_ids[0]: each for each in await core.next_requests(3)}
    assert [again[n].resumed_ids for n in range(3)] == [[7], [], []]
    assert min(each.handle for each in again.values()) > received[-1].handle  # handles are not used again
    core.step([each.row(8, finish=STOP) for each in again.values()])
    for generation in generations:
        assert await generation.next() == Tokens([8], Finished(FinishReason.STOP, None, 0))
    await works(core, cores)


async def test_tokens_that_came_before_the_core_died_are_not_lost(core: FakeCore, cores: StaticCores) -> None:
    generation, other = cores.submit(request(1)), cores.submit(request(2))
    received, marker = await core.next_requests(2)
    core.step([received.row(1, 2), marker.row(3)])
    assert (await other.next()).ids == [3]
    await core.kill()
    await until(cores, lambda: cores.not_ready_reason() is not None)
    assert await generation.next() == Tokens([1, 2], None)


async def test_a_choice_that_ended_before_the_core_died_keeps_its_end(core: FakeCore, cores: StaticCores) -> None:
    ended, other = cores.submit(request(1)), cores.submit(request(2))
    a, b = await core.next_requests(2)
    core.step([a.row(1, finish=STOP), b.row(2)])
    await other.next()
    await core.kill()
    await until(cores, lambda: cores.not_ready_reason() is not None)
    assert (await ended.next()).finished is not None
    await core.start()
    assert (await core.next_request()).prompt_ids == [2]  # and nothing else comes again
    await works(core, cores)


_CORE_PROCESS = """
import asyncio, sys
from tests.fakes.core import FakeCore

async def main():
    async with FakeCore(sys.argv[1], outputs=lambda request: range(1_000_000), step_seconds=0.005):
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_core_process_that_is_killed_or_hangs(tmp_path: Path, number: int) -> None:
    address = f"unix:{tmp_path}/core.sock"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _CORE_PROCESS, address, cwd=_ROOT)
    other = FakeCore(f"unix:{tmp_path}/other.sock", outputs=lambda _: range(1_000_000))
    try:
        async with open_cores(address, other.address, heartbeat_interval=0.5, heartbeat_timeout=2.0) as cores:
            await cores.wait_until_ready()
            generations = [cores.submit(request(max_tokens=1_000_000)) for _ in range(3)]
            ids = {generation: (await generation.next()).ids for generation in generations}
            await other.start()
            process.send_signal(number)
            resumed = await other.next_requests(3)
            for generation in generations:
                before = len(ids[generation])
                while len(ids[generation]) < before + 50 or not generation.attempt:
                    ids[generation] += (await generation.next()).ids
                assert ids[generation] == list(range(len(ids[generation])))
            assert [each.submit.attempt for each in resumed] == [1, 1, 1]
    finally:
        await other.kill()
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED],
)
async def test_a_stream_that_the_core_ends(core: FakeCore, cores: StaticCores, code: grpc.StatusCode) -> None:
    generation = cores.submit(request())
    await core.next_request()
    core.connections[0].end(code, "outbox full")
    again = await core.next_request()
    assert again.connection is core.connections[1]
    again.send(5, finish=STOP)
    assert (await generation.next()).ids == [5]


async def test_a_core_that_is_not_ready_says_why() -> None:
    async with FakeCore() as core:
        core.refusal = (grpc.StatusCode.UNAVAILABLE, "The worker is loading the model")
        async with open_cores(core.address) as cores:
            await until(cores, lambda: "worker is loading" in (cores.not_ready_reason() or ""))
            core.refusal = None
            await cores.wait_until_ready()


async def test_a_silent_core_counts_as_dead() -> None:
    async with (
        FakeCore(heartbeat=0.05) as core,
        open_cores(core.address, heartbeat_interval=0.1, heartbeat_timeout=0.5) as cores,
    ):
        await cores.wait_until_ready()
        generation = cores.submit(request())
        await core.next_request()
        core.go_silent()
        await until(cores, lambda: "silent" in (cores.not_ready_reason() or ""))
        await core.wait_for(lambda: core.connections[0].closed)  # the stream is given up, not just forgotten
        core.speak()
        (await core.next_request()).send(5, finish=STOP)
        assert (await generation.next()).ids == [5]


async def test_a_core_that_never_greets_counts_as_dead() -> None:
    async with FakeCore(heartbeat=60) as core:
        core.greets = False
        async with open_cores(core.address, heartbeat_interval=0.1, heartbeat_timeout=0.3) as cores:
            await until(cores, lambda: "silent" in (cores.not_ready_reason() or ""))
            core.greets = True
            await cores.wait_until_ready()


async def test_heartbeats_go_out(core: FakeCore) -> None:
    async with open_cores(core.address, heartbeat_interval=0.02) as cores:
        await cores.wait_until_ready()
        await core.wait_for(lambda: core.connections[0].heartbeats >= 3)


async def test_a_core_with_heartbeats_and_without_work_lives() -> None:
    async with (
        FakeCore(heartbeat=0.05) as core,
        open_cores(core.address, heartbeat_interval=0.2, heartbeat_timeout=1.0) as cores,
    ):
        await cores.wait_until_ready()
        generation = cores.submit(request())
        received = await core.next_request()
        connection = core.connections[0]
        await core.wait_for(lambda: connection.heartbeats >= 7)  # longer than the timeout
        received.send(5)
        assert (await generation.next()).ids == [5]
        assert len(core.connections) == 1


async def test_a_core_of_an_unknown_version_is_not_used() -> None:
    async with FakeCore(protocol=3) as core, open_cores(core.address) as cores:
        await until(cores, lambda: "version 3" in (cores.not_ready_reason() or ""))
        assert cores.streams[0].state is CoreState.REFUSED
        with pytest.raises(UnavailableError, match="version 3"):
            cores.submit(request())
        core.welcome.protocol = 2  # replaced by one that suits
        await cores.wait_until_ready()


async def test_a_core_with_another_tokenizer_is_not_used() -> None:
    async with FakeCore(tokenizer_fingerprint="other") as core, open_cores(core.address) as cores:
        await until(cores, lambda: "tokenizer differs" in (cores.not_ready_reason() or ""))
        with pytest.raises(UnavailableError, match="tokenizer differs"):
            cores.submit(request())
        assert cores.models() == []
        await core.kill()
        core.welcome.tokenizer_fingerprint = "tokenizer"
        await core.start()
        await cores.wait_until_ready()
        await works(core, cores)


async def test_a_core_of_the_first_version() -> None:
    async with FakeCore(only_version=1) as old, open_cores(old.address) as cores:
        await cores.wait_until_ready()
        assert [connection.frames[0].hello.protocol for connection in old.connections] == [2, 1]
        assert old.connections[1].frames[0].hello.oldest_protocol == 0  # word for word as that version said it
        await works(old, cores)


async def test_a_core_that_refuses_every_version() -> None:
    async with FakeCore(only_version=9) as core, open_cores(core.address) as cores:
        await until(cores, lambda: cores.streams[0].state is CoreState.REFUSED)
        assert "speaks version 9" in (cores.not_ready_reason() or "")


async def test_a_core_that_does_not_suit_harms_no_other(core: FakeCore) -> None:
    async with FakeCore(tokenizer_fingerprint="other") as other, open_cores(other.address, core.address) as cores:
        await cores.wait_until_ready()
        await until(cores, lambda: cores.streams[0].info is not None)
        for _ in range(3):
            await works(core, cores)
        assert other.requests == []


async def test_a_draining_core_gets_no_new_requests(core: FakeCore) -> None:
    async with FakeCore() as other, open_cores(core.address) as cores:
        await cores.wait_until_ready()
        running = cores.submit(request())
        received = await core.next_request()
        core.drain("SIGTERM")
        await until(cores, lambda: cores.not_ready_reason() is not None)
        with pytest.raises(UnavailableError, match="SIGTERM"):
            cores.submit(request())
        received.send(5)
        assert (await running.next()).ids == [5]  # what runs goes on
        running.abort("enough")
        await core.wait_for(lambda: received.aborted)
        assert other.requests == []


async def test_requests_go_to_the_least_loaded() -> None:
    async with (
        FakeCore(core_id="a", max_slots=10) as a,
        FakeCore(core_id="b", max_slots=10) as b,
        open_cores(a.address, b.address) as cores,
    ):
        await until(cores, lambda: len(cores.models()) == 1 and all(stream.info for stream in cores.streams))
        generations = [cores.submit(request(n)) for n in range(8)]
        await a.next_requests(4)
        await b.next_requests(4)  # what was just submitted counts, before any Stats
        marker = b.requests[0]
        a.stats(running=9, waiting=1)  # six of other front ends
        a.requests[0].send(1)
        marker.send(1)
        for generation in generations:
            if generation.request.prompt_ids[0] in (a.requests[0].prompt_ids[0], marker.prompt_ids[0]):
                await generation.next()
        for n in range(6):
            cores.submit(request(100 + n))
        assert [received.prompt_ids[0] for received in await b.next_requests(6)] == list(range(100, 106))


async def test_stopping_ends_what_runs(core: FakeCore) -> None:
    async with open_cores(core.address) as cores:
        await cores.wait_until_ready()
        generation = cores.submit(request())
        await core.next_request()
    await fails(generation)
    await core.wait_for(lambda: core.connections[0].closed)


async def test_cancelling_run_ends_what_runs(core: FakeCore) -> None:
    cores = build([core.address])
    run = asyncio.create_task(cores.run())
    await cores.wait_until_ready()
    generation = cores.submit(request())
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await fails(generation)
    with pytest.raises(UnavailableError, match="stopping"):
        cores.submit(request())


@pytest.mark.parametrize(
    "addresses", [[], ["localhost"], ["localhost:0"], [":80"], ["h:99999"], ["unix:"], ["h:1", "h:1"]]
)
def test_addresses_are_checked(addresses: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        build(addresses)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="least_loaded"):
        routing_policy("fastest")


def test_several_names() -> None:
    assert build(["h:1"], names=["a", "b", "a"]).models() == []  # none while nothing is connected
