"""Starting, failing and stopping, as a user sees it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import READY_S, Serving, engine_idle, engine_info, serve
from tests.fakes.checkpoints import write_tiny_llama


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    write_tiny_llama(path)
    return path


def test_ctrl_c_stops_everything_within_five_seconds_and_leaves_nothing(tiny: Path) -> None:
    with serve(tiny) as running:
        services = running.children()
        assert set(services) == {"frontend", "core", "worker"}
        mapped = [Path(f"/proc/{process.pid}/maps").read_text() for process in services.values()]
        assert not [line for maps in mapped for line in maps.splitlines() if "/dev/shm/" in line]  # nothing to remove
        begin = time.monotonic()
        code = running.stop(signal.SIGINT)
        took = time.monotonic() - begin
        assert code == 0
        assert took < 5
        assert not [name for name, process in services.items() if process.is_running()]
        assert list(running.run_base.iterdir()) == []


def test_a_stream_that_runs_at_ctrl_c_ends_with_one_terminal_event(tiny: Path) -> None:
    with serve(tiny, "--served-model-name=tiny") as running:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as http, http.stream("POST", f"{running.url}/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            next(lines)
            running.process.send_signal(signal.SIGINT)
            events = list(lines)
        assert events[-1] == "data: [DONE]"
        assert running.process.wait(READY_S) == 0


def _streamed(running: Serving, then: Callable[[], None], **changes: object) -> list[str]:
    """Streams a completion, calls ``then`` after its first event, and returns all events."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True, "seed": 3}
    with httpx.Client(timeout=120) as http:
        with http.stream("POST", f"{running.url}/v1/completions", json=body | changes) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: "))
            events = [next(lines)]
            then()
            return events + list(lines)


def _text(events: list[str]) -> str:
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def test_a_killed_worker_is_a_pause_for_its_streams(tiny: Path) -> None:
    with serve(tiny, "--served-model-name=tiny") as running:
        undisturbed = _streamed(running, lambda: None)
        disturbed = _streamed(running, running.children()["worker"].kill)
        assert undisturbed[-1] == disturbed[-1] == "[DONE]"
        assert _text(disturbed) == _text(undisturbed)
        assert running.stop() == 0


def test_a_worker_that_is_killed_again_and_again_ends_the_command(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny", max_len=8192)
    with serve(tiny, "--served-model-name=tiny") as running:
        killed: set[int] = set()

        def kill_all() -> None:
            while running.process.poll() is None:
                try:
                    worker = running.children().get("worker")
                    if worker is not None and worker.pid not in killed:
                        worker.kill()
                        killed.add(worker.pid)
                except psutil.NoSuchProcess:
                    continue

        events = _streamed(running, kill_all, max_tokens=8000)  # more than come before the first of them is killed
        assert sum('"error"' in event for event in events) == 1
        assert events[-1] == "[DONE]"
        assert running.process.wait(READY_S) == 1
        assert len(killed) == 4, "three restarts"
        assert list(running.run_base.iterdir()) == []


def test_the_supervisors_death_takes_the_services_along_and_leaves_nothing(tiny: Path) -> None:
    with serve(tiny) as running:
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert len(processes) >= 4, "three services and the janitor"
        assert list(running.run_base.iterdir()) != []
        running.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert not alive
        assert list(running.run_base.iterdir()) == []


def _fails(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tercet_shared.cli", "serve", "--port=0", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    assert "does not exist" in _fails(str(tmp_path / "nothing"))


def test_a_truncated_checkpoint_is_one_sentence(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in _fails(str(tiny))


def test_an_unknown_architecture_is_one_sentence(tiny: Path) -> None:
    config = tiny / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MysteryForCausalLM"))
    assert "MysteryForCausalLM" in _fails(str(tiny))


def test_a_taken_port_is_one_sentence(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in _fails(f"--port={port}", str(tiny))


def test_a_client_that_leaves_frees_its_slot_and_blocks(serving: Serving) -> None:
    before = asyncio.run(engine_idle(serving)).output_tokens
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60) as http:
        with http.stream("POST", f"{serving.url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # kept: the end of an iterator closes the reply
            next(lines)
            assert asyncio.run(engine_info(serving)).stats.running == 1
        after = asyncio.run(engine_idle(serving)).output_tokens
        assert after - before < 4000, "the request has run on for a client that has left"
