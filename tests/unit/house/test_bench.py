"""`make bench-serve`: flags go to the command that knows them; both sides and their ratios are printed."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from tests.bench.serve import parse, settings_of, split
from tests.fakes.openai_server import FakeServer


def test_flags_go_where_they_are_known() -> None:
    bench, serve = split(
        ["--concurrency", "1,16", "--dtype", "float32", "--requests=4", "--no-prefix-caching", "--no-ignore-eos"]
    )
    assert bench == ["--concurrency", "1,16", "--requests=4", "--no-ignore-eos"]
    assert serve == ["--dtype", "float32", "--no-prefix-caching"]


def test_there_are_three_rounds_unless_told_otherwise() -> None:
    assert settings_of(parse(["--url=http://a"]), "http://a").rounds == 3
    assert settings_of(parse(["--url=http://a", "--rounds=1"]), "http://a").rounds == 1


@pytest.mark.parametrize(
    "argv",
    [[], ["--url=http://a", "--dtype=float32"], ["--url=http://a", "--serve=m"], ["--url=u", "--peer=p", "--model=m"]],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err


async def test_both_sides_and_their_ratios_are_one_object_per_load() -> None:
    async with FakeServer() as server, FakeServer() as peer:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "tests/bench/serve.py", f"--url={server.url}", f"--peer={peer.url}", "--concurrency=1,2",
            "--requests=2", "--rounds=2", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["concurrency"] for line in lines] == [1, 2]
    for line in lines:
        assert line["server"]["completed"] == line["peer"]["completed"] == 4
        assert line["ratio"]["output_tokens_per_s"] > 0
    assert b"A/B" in err
    assert len(server.bodies) == len(peer.bodies) == 1 + 2 * 2 * 2
