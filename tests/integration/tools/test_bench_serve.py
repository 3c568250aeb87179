"""`tercet bench serve` as a process: tables, files, exit codes, interruption."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.openai_server import Answer, FakeServer, tokens
from tests.fakes.ports import free_port

TIMEOUT = 60.0


@dataclass
class Ended:
    code: int
    out: str
    err: str


async def start(*flags: str, **environment: str) -> asyncio.subprocess.Process:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tercet_shared.cli", "bench", "serve", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=kept | environment,
    )  # fmt: skip


async def end(process: asyncio.subprocess.Process) -> Ended:
    async with asyncio.timeout(TIMEOUT):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def bench(*flags: str, **environment: str) -> Ended:
    return await end(await start(*flags, **environment))


async def test_a_table_a_file_and_a_picture(tmp_path: Path) -> None:
    async with FakeServer() as server:
        ended = await bench(
            f"--url={server.url}", "--concurrency=1,3", "--requests=5", "--input-tokens=8-16", "--output-tokens=4",
            f"--json={tmp_path}/found.json", f"--plot={tmp_path}/found.svg", "--goodput=ttft:60000",
            TERCET_API_KEY="key",
        )  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    assert "concurrency 1 · 5 requests" in ended.out
    assert "5 answered, 0 failed" in ended.out
    assert len(server.bodies) == 1 + 2 * 5
    assert all(8 <= len(body["prompt"]) <= 16 for body in server.bodies)
    assert all(b"Authorization: Bearer key" in head for head in server.heads)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [load["concurrency"] for load in found["loads"]] == [1, 3]
    for load in found["loads"]:
        (figures,) = load["servers"]
        assert (figures["completed"], figures["output_tokens"], figures["events_per_token"]) == (5, 20, 1.0)
        assert 0 < figures["ttft_p50_ms"] <= figures["e2e_p50_ms"]
        assert figures["good_requests"] == 5
        assert figures["client_cpu_us_per_token"] > 0
    assert "key" not in found["settings"].values()
    assert (tmp_path / "found.svg").read_text().startswith("<svg ")


async def test_two_servers_get_the_same_requests_and_ratios() -> None:
    async with FakeServer() as one, FakeServer() as two:
        ended = await bench(
            f"--url={one.url}", f"--url={two.url}", "--concurrency=2", "--requests=4", "--rounds=2", "--json=-"
        )
    assert ended.code == 0
    assert "A/B" in ended.err

    def prompts(server: FakeServer) -> list[Any]:
        return sorted(body["prompt"] for body in server.bodies)

    assert prompts(one) == prompts(two)
    assert len(one.bodies) == 1 + 2 * 4
    (load,) = json.loads(ended.out)["loads"]
    assert load["ratios"][0]["requests_per_s"] > 0


async def test_chats_are_made_of_words_that_were_counted_first() -> None:
    async with FakeServer() as server:
        ended = await bench(
            f"--url={server.url}", "--endpoint=chat", "--request-rate=inf", "--requests=6", "--input-tokens=50",
            "--extra-body", '{"top_p": 0.5}', "--no-ignore-eos",
        )  # fmt: skip
    assert ended.code == 0, ended.err
    asked = [body for body in server.bodies if body["stream"]]
    # The server counts ten tokens, and two for every word.
    assert {len(body["messages"][0]["content"].split()) for body in asked} == {20}
    assert all(body["top_p"] == 0.5 and "ignore_eos" not in body for body in asked)


async def test_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "hello", "max_tokens": 2}\n')
    async with FakeServer() as server:
        ended = await bench(f"--url={server.url}", f"--dataset={path}", "--requests=3", "--concurrency=1")
    assert ended.code == 0
    assert {(body["prompt"], body["max_tokens"]) for body in server.bodies} == {("hello", 2)}


async def test_some_failures_are_counted_and_only_failures_are_exit_code_1() -> None:
    def answer(body: dict[str, Any]) -> Answer:
        refused = broken or len(server.bodies) % 2 == 0
        return Answer(('{"error": {"message": "full"}}',), 429) if refused else Answer(tokens(body["max_tokens"]))

    broken = False
    async with FakeServer(answer) as server:
        url = server.url
        some = await bench(f"--url={server.url}", "--concurrency=1", "--requests=6")
        broken = True
        warm = await bench(f"--url={server.url}", "--concurrency=1", "--requests=6")
        all_failed = await bench(f"--url={server.url}", "--concurrency=1", "--requests=6", "--warmup=0")
    assert some.code == 0
    assert "! 3 requests failed (HTTP 429): full" in some.out
    assert (warm.code, warm.out) == (1, "")
    assert warm.err == f"error: {url} answers no request: HTTP 429: full\n"
    assert all_failed.code == 1
    assert "0 answered, 6 failed" in all_failed.out


async def test_an_interruption_reports_what_was_measured() -> None:
    gate = asyncio.Event()
    gate.set()
    async with FakeServer(lambda body: Answer(tokens(body["max_tokens"]), gate=gate)) as server:
        process = await start(f"--url={server.url}", "--concurrency=2", "--requests=100000", "--json=-")
        await server.asked(20)
        gate.clear()
        await server.asked(len(server.bodies) + 1)
        process.send_signal(signal.SIGINT)
        ended = await end(process)
    assert ended.code == 130
    assert "interrupted" in ended.err
    found = json.loads(ended.out)
    assert found["interrupted"] is True
    (load,) = found["loads"]
    assert load["servers"][0]["completed"] >= 10
    assert load["servers"][0]["unfinished"] >= 1


async def test_nobody_listens() -> None:
    ended = await bench(f"--url=http://127.0.0.1:{free_port()}")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: No connection to 127.0.0.1:")


@pytest.mark.parametrize("flags", [[], ["--url=http://a", "--concurrency=0"], ["--url=http://a", "--frob"]])
async def test_wrong_usage_is_exit_code_2(flags: list[str]) -> None:
    ended = await bench(*flags)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err


async def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured() -> None:
    async with FakeServer() as server:
        ended = await bench(f"--url={server.url}", "--requests=1", "--concurrency=1", "--json=/nowhere/found.json")
    assert ended.code == 2
    assert "/nowhere/found.json cannot be written" in ended.err
    assert not server.bodies


def test_the_help_teaches() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tercet_shared.cli", "bench", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "examples:\n  tercet bench serve --url http://127.0.0.1:8000\n" in done.stdout
    assert "exit codes" in done.stdout


def test_a_missing_extra_is_one_sentence() -> None:
    program = (
        "import sys; sys.modules['httptools'] = None;"
        "from tercet_shared.cli import main; sys.exit(main(['bench', 'serve', '--url', 'http://a']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "error: `tercet bench` needs the package httptools, which is not installed: "
        "`pip install 'tercet-shared[tools]'`.\n"
    )
