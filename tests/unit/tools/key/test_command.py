"""``tercet key``: what it makes is what the front end reads."""

from __future__ import annotations

import io
import shlex
from hashlib import sha256
from pathlib import Path

import pytest

from tercet_frontend.access.key_file import read_keys
from tercet_frontend.access.keys import ApiKey
from tercet_frontend.access.redis_keys import redis_key
from tercet_shared.cli import main as tercet
from tercet_tools.key.command import KEY_PREFIX, main

FLAGS = [
    "--tenant", "team", "--model", "smol-*", "--model", 'a "b"', "--max-concurrent", "8", "--requests-per-minute", "60",
    "--tokens-per-minute", "1000", "--priority", "3", "--best-priority", "-1", "--expires", "2030-01-01T00:00:00Z",
]  # fmt: skip


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Returns the entry and the key."""
    assert main(["new", *arguments]) == 0
    out, err = capsys.readouterr()
    return out, err.rpartition(" ")[2].strip()


def check(entry: ApiKey, key: str) -> None:
    assert entry == ApiKey(
        name="alice", hash=f"sha256:{sha256(key.encode()).hexdigest()}", tenant="team", models=("smol-*", 'a "b"'),
        max_concurrent=8, requests_per_minute=60, tokens_per_minute=1000, priority=3, best_priority=-1,
        expires="2030-01-01T00:00:00Z",
    )  # fmt: skip


def test_entries_for_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, key = made(capsys, "alice", *FLAGS)
    second, other = made(capsys, "bob")
    assert key.startswith(KEY_PREFIX)
    assert len(key) > 40
    assert key != other
    assert key not in first
    path = tmp_path / "keys.toml"
    path.write_text(first + second)
    alice, bob = read_keys(path)
    check(alice, key)
    assert (bob.name, bob.limited) == ("bob", False)
    entry, key = made(capsys, "alice", *FLAGS, "--format", "json")
    path = tmp_path / "keys.json"
    path.write_text(f'{{"keys": [{entry}]}}')
    check(read_keys(path)[0], key)


def test_a_command_for_redis(capsys: pytest.CaptureFixture[str]) -> None:
    text, key = made(capsys, "alice", *FLAGS, "--format", "redis")
    command, where, *fields = shlex.split(text)
    digest = sha256(key.encode())
    assert (command, where) == ("HSET", redis_key(digest.digest()))
    entry = dict(zip(fields[::2], fields[1::2], strict=True)) | {"hash": f"sha256:{digest.hexdigest()}"}
    check(ApiKey.model_validate(entry), key)


def test_a_key_that_exists(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sesame\n"))
    assert tercet(["key", "hash", "old"]) == 0
    out, err = capsys.readouterr()
    assert sha256(b"sesame").hexdigest() in out
    assert "sesame" not in out + err
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["hash", "old"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [[], ["new"], ["old", "x"], ["new", "a/b"], ["new", "a", "--max-concurrent", "0"], ["new", "a", "--tenant", ""]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: tercet key" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "examples:" in capsys.readouterr().out
