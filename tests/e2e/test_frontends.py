"""Several front ends behind one port, as a user sees them."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import Serving, commands, serve
from tests.fakes.checkpoints import write_tiny_llama

TIMEOUT_S = 60.0
FLAGS = ("--served-model-name=tiny", "--heartbeat-timeout=30")
PROMPT = {"model": "tiny", "prompt": [5, 6, 7], "ignore_eos": True, "seed": 3}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    write_tiny_llama(path)
    return path


def front_ends(running: Serving) -> dict[int, psutil.Process]:
    """Returns the front ends by number."""
    found = {}
    for child, command in commands(running.process.pid):
        with_socket = re.search(r"http(\d+)\.sock", command)
        if with_socket:
            found[int(with_socket[1])] = child
    return found


@contextmanager
def alone(running: Serving, number: int) -> Iterator[httpx.Client]:
    """A client of one front end, past the port."""
    (path,) = running.run_base.glob(f"*/http{number}.sock")
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://front-end", timeout=TIMEOUT_S
    ) as http:
        yield http


def ask(http: httpx.Client, url: str = "") -> None:
    reply = http.post(f"{url}/v1/completions", json=PROMPT | {"max_tokens": 3})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 3


def test_whoever_can_takes_the_next_connection(tiny: Path) -> None:
    with serve(tiny, "--frontends=2", *FLAGS) as running:
        processes = front_ends(running)
        assert set(processes) == {1, 2}
        for number, stopped in processes.items():
            with alone(running, number) as http:
                assert http.get("/readyz").status_code == 200, "announced before all of them are ready"
            stopped.suspend()
            # A connection for each: none may wait for the process that is stopped.
            for _ in range(10):
                with httpx.Client(timeout=TIMEOUT_S) as http:
                    ask(http, running.url)
            stopped.resume()
        assert running.stop() == 0


def test_one_that_is_killed_comes_back_and_nobody_else_notices(tiny: Path) -> None:
    with serve(tiny, "--frontends=2", *FLAGS) as running, alone(running, 2) as second:
        killed = front_ends(running)[1]
        long = PROMPT | {"max_tokens": 1500, "stream": True, "stream_options": {"include_usage": True}}
        with second.stream("POST", "/v1/completions", json=long) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: "))
            events = [next(lines)]
            killed.kill()
            killed.wait(TIMEOUT_S)
            events += lines
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 1500
        # Until it is back, and then on: every client is served, by one that is able to.
        back = False
        while not back:
            with httpx.Client(timeout=TIMEOUT_S) as http:
                ask(http, running.url)
            again = front_ends(running).get(1)
            back = again is not None and again.pid != killed.pid and _serves(running, 1)
        with alone(running, 1) as http:
            ask(http)
        assert running.stop() == 0


def _serves(running: Serving, number: int) -> bool:
    paths = list(running.run_base.glob(f"*/http{number}.sock"))
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(paths[0]) if paths else "")
        except OSError:  # no socket there, or nobody at it
            return False
    with alone(running, number) as http:
        return http.get("/readyz").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_of_them_end_their_streams_at_a_stop(tiny: Path, number: int) -> None:
    with serve(tiny, "--frontends=3", "--grace=1", *FLAGS) as running:
        processes = front_ends(running)

        def stream(which: int) -> list[str]:
            endless = PROMPT | {"max_tokens": 2000, "stream": True}
            with alone(running, which) as http, http.stream("POST", "/v1/completions", json=endless) as reply:
                lines = (line for line in reply.iter_lines() if line.startswith("data: "))
                next(lines)
                begun.wait(TIMEOUT_S)
                return list(lines)

        # One of them sends the signal: a second one would cut the streams.
        begun = threading.Barrier(len(processes), lambda: running.process.send_signal(number))
        with ThreadPoolExecutor(len(processes)) as threads:
            ends = [events[-1] for events in threads.map(stream, processes)]
        assert ends == ["data: [DONE]"] * 3
        assert running.process.wait(TIMEOUT_S) == 0
        assert not [process for process in processes.values() if process.is_running()]
        assert list(running.run_base.iterdir()) == []


def test_one_that_dies_again_and_again_ends_the_command(tiny: Path) -> None:
    with serve(tiny, "--frontends=2", *FLAGS) as running:
        killed: set[int] = set()
        while running.process.poll() is None:
            try:
                victim = front_ends(running).get(2)
                if victim is not None and victim.pid not in killed:
                    victim.kill()
                    killed.add(victim.pid)
            except psutil.NoSuchProcess:
                continue
        assert running.process.returncode == 1
        assert len(killed) == 4, "three restarts"
