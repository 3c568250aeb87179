"""``python -m tercet_frontend`` as a process: its start, its reports, its signals, its exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest

from tercet_frontend.server import HttpServer, open_listener, serve
from tercet_shared.config import FrontendSettings, parse
from tercet_shared.errors import ConfigurationError, UnavailableError
from tercet_shared.lifecycle.report import Event, LogReporter, parse_event
from tests.contract.frontend.conftest import EOS, TIMEOUT, events
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tercet_frontend.admission import Admission
    from tercet_frontend.tokenizing import ModelText

CHAT = "/v1/chat/completions"


@dataclass
class Process:
    """A front end, and the pipe on which it reports."""

    process: asyncio.subprocess.Process
    reports: asyncio.StreamReader

    async def report(self, kind: str) -> Event:
        """Returns the next report of that kind."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                event = parse_event(await self.reports.readuntil())
                if event.event == kind:
                    return event

    async def end(self) -> int:
        """Returns the exit code."""
        async with asyncio.timeout(TIMEOUT):
            return await self.process.wait()


@asynccontextmanager
async def front_end(*arguments: str, **environment: str) -> AsyncIterator[Process]:
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    with os.fdopen(read_end, "rb") as pipe:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tercet_frontend", *arguments, "--report-fd", str(write_end),
                pass_fds=[write_end], env=os.environ | environment,
            )  # fmt: skip
        finally:
            os.close(write_end)
        try:
            yield Process(process, reader)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            transport.close()


async def _ready(http: httpx.AsyncClient, core: FakeCore) -> None:
    """Returns when the front end is ready: from the greeting on, it is so within a few questions."""
    await core.connected()
    async with asyncio.timeout(TIMEOUT):
        while (await http.get("/readyz")).status_code != 200:
            pass


async def test_life_of_a_front_end(model_path: Path, text: ModelText, tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/core.sock"
    async with front_end(str(model_path), "--core", socket, "--port", "0", TERCET_API_KEY='["secret"]') as process:
        up = await process.report("ready")
        async with httpx.AsyncClient(base_url=up.detail["url"], timeout=TIMEOUT) as http:
            assert (await http.get("/livez")).status_code == 200
            ready = await http.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["reason"]
            assert (await http.get("/v1/models")).status_code == 401
            http.headers["Authorization"] = "Bearer secret"

            async with FakeCore(socket, tokenizer_fingerprint=text.tokenizer.fingerprint) as core:
                await _ready(http, core)
                models = (await http.get("/v1/models")).json()["data"]
                assert [model["id"] for model in models] == [model_path.stem]
                body: dict[str, Any] = {
                    "model": model_path.stem,
                    "messages": [{"role": "user", "content": "Hi"}],
                    "stream": True,
                }
                finishing = asyncio.create_task(http.post(CHAT, json=body))
                one = await core.next_request()
                async with http.stream("POST", CHAT, json=body) as response:
                    other = await core.next_request()
                    other.send(100)

                    process.process.send_signal(signal.SIGTERM)
                    one.send(EOS, finish=STOP, stop_id=EOS)
                    assert '"finish_reason":"stop"' in (await finishing).text
                    *_, error, done = await events(response)  # nothing more comes for it: the grace runs out
                assert orjson.loads(error)["error"]["code"] == "service_unavailable"
                assert done == "[DONE]"
                assert await process.end() == 0
            with pytest.raises(httpx.ConnectError):
                await http.get("/livez")


async def test_the_grace_is_that_of_the_settings(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces = []

    async def wind_down(_server: asyncio.Task[None], _http: HttpServer, admission: Admission, grace: float) -> None:
        graces.append(grace)
        with pytest.raises(UnavailableError, match="shutting down"):
            admission.admit()

    monkeypatch.setattr("tercet_frontend.server._wind_down", wind_down)
    flags = ("--core", f"unix:{tmp_path}/core.sock", "--port", "0", "--grace", "7.5", "--drain-delay", "0.01")
    settings = parse(FrontendSettings, [str(model_path), *flags])
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(TIMEOUT):
        await serve(settings, LogReporter(), stop)
    assert graces == [7.5]


async def test_stops_while_it_loads(model_path: Path, tmp_path: Path) -> None:
    async with front_end(str(model_path), "--core", f"unix:{tmp_path}/core.sock", "--port", "0") as process:
        await process.report("ready")
        process.process.send_signal(signal.SIGTERM)
        assert await process.end() == 0


async def test_port_in_use(model_path: Path, tmp_path: Path) -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        async with front_end(str(model_path), "--core", f"unix:{tmp_path}/x", "--port", str(port)) as process:
            message = (await process.report("fatal")).message
            assert await process.end() == 1
    assert message == (
        f"Cannot listen on port {port} of 127.0.0.1: it is in use by another program; choose another with --port."
    )


async def test_model_that_is_not_there(tmp_path: Path) -> None:
    async with front_end(str(tmp_path / "none.gguf"), "--core", f"unix:{tmp_path}/x", "--port", "0") as process:
        assert "does not exist" in (await process.report("fatal")).message
        assert await process.end() == 1


@pytest.mark.parametrize(("host", "port"), [("host.invalid", 0), ("203.0.113.1", 0), ("a" * 100, 0)])
def test_addresses_that_cannot_be_listened_on(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match=r"listen|address"):
        open_listener(host, port)
