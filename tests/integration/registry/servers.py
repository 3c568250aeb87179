"""Servers of every kind that an address of Redis may mean: real ones, on free ports."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from tests.fakes.certificates import Authority
from tests.fakes.ports import free_port
from tests.fakes.redis_server import server_binary

TIMEOUT = 60.0


@asynccontextmanager
async def running(*arguments: str, ready: bytes = b"Ready to accept connections") -> AsyncIterator[None]:
    """A server; its directory is the current one of its process."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        process = await asyncio.create_subprocess_exec(
            server_binary(), *arguments, cwd=directory, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(TIMEOUT):
                while ready not in (line := await process.stdout.readline()):
                    assert line, "the server ended"
            yield
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


def plain(port: int) -> list[str]:
    return ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]


@asynccontextmanager
async def one(*arguments: str) -> AsyncIterator[int]:
    port = free_port()
    async with running(*plain(port), *arguments):
        yield port


@asynccontextmanager
async def cluster() -> AsyncIterator[str]:
    """A cluster of two nodes, so that keys are in different places."""
    async with AsyncExitStack() as stack:
        ports = [free_port(), free_port()]
        halves = [(0, 8191), (8192, 16383)]
        for port in ports:
            bus = str(free_port())
            options = ("--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "5000")
            await stack.enter_async_context(running(*plain(port), *options))
        nodes = [await stack.enter_async_context(Redis(port=port)) for port in ports]
        for node, (first, last) in zip(nodes, halves, strict=True):
            await node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        other = await nodes[1].execute_command("CONFIG", "GET", "cluster-port")
        bus_port = int(other[b"cluster-port"] if isinstance(other, dict) else other[1])
        await nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1], bus_port)
        async with asyncio.timeout(TIMEOUT):
            for node in nodes:
                await _complete(node)
        yield f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"


async def _complete(node: Redis) -> None:
    """Waits until the node knows who has which keys."""
    while True:
        info = await node.execute_command("CLUSTER", "INFO")
        if b"cluster_state:ok" in info:
            return
        await asyncio.sleep(0.02)


@asynccontextmanager
async def sentinel(directory: Path) -> AsyncIterator[str]:
    async with one("--requirepass", "secret") as port:
        watch = free_port()
        file = directory / "sentinel.conf"
        file.write_text(
            f"port {watch}\nbind 127.0.0.1\nsentinel monitor the-service 127.0.0.1 {port} 1\n"
            "sentinel auth-pass the-service secret\n"
        )
        async with running(str(file), "--sentinel", ready=b"+monitor"):
            dead = free_port()
            yield f"redis+sentinel://:secret@127.0.0.1:{dead},127.0.0.1:{watch}/the-service/2"


@asynccontextmanager
async def over_tls(directory: Path) -> AsyncIterator[str]:
    """A server behind something that speaks TLS for it and asks for certificates."""
    authority = Authority(directory)
    own, ours = authority.issue("server"), authority.issue("client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.chain, own.key)
    context.load_verify_locations(authority.certificate.chain)
    context.verify_mode = ssl.CERT_REQUIRED
    async with one() as port:
        carried: set[asyncio.Task[None]] = set()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            carried.add(task)
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

        front = await asyncio.start_server(carry, "127.0.0.1", 0, ssl=context)
        async with front:
            yield (
                f"rediss://127.0.0.1:{front.sockets[0].getsockname()[1]}/1"
                f"?ssl_ca_certs={authority.certificate.chain}&ssl_certfile={ours.chain}&ssl_keyfile={ours.key}"
            )
            await asyncio.gather(*carried)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
