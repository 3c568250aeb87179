"""API keys: what an entry says, and files of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tercet_frontend.access.key_file import KeyFile, read_keys
from tercet_frontend.access.keys import ANONYMOUS, ApiKey
from tercet_frontend.access.watch import FileWatch
from tercet_shared.errors import ConfigurationError
from tests.unit.frontend.access.conftest import Clock, hash_of, make_key

TOML = f"""
[[keys]]
name = "alice"
hash = "{hash_of("alice")}"
tenant = "team-a"
models = ["smol-*", "big"]
max_concurrent = 8
requests_per_minute = 60
tokens_per_minute = 100_000
priority = 5
best_priority = 0
expires = 2030-01-01T00:00:00Z

[[keys]]
name = "bob"
hash = "{hash_of("bob")}"
disabled = true
"""


def digest(key: str) -> bytes:
    return bytes.fromhex(hash_of(key).removeprefix("sha256:"))


def test_an_entry() -> None:
    key = make_key(
        tenant="team", models=["a", "b-*"], expires="2030-01-01T00:00:00Z", max_concurrent=2, best_priority=-1
    )
    assert (key.owner, key.digest, key.limited) == ("team", digest("alice"), True)
    assert [key.may_use(name) for name in ("a", "b-1", "b", "ab", "A")] == [True, True, False, False, False]
    assert not key.expired(datetime(2029, 12, 31, tzinfo=UTC))
    assert key.expired(datetime(2030, 1, 1, tzinfo=UTC))


def test_the_least_that_an_entry_has() -> None:
    key = make_key()
    assert (key.owner, key.limited, key.priority, key.disabled) == ("alice", False, 0, False)
    assert key.may_use("anything")
    assert not key.expired()
    assert (ANONYMOUS.owner, ANONYMOUS.limited, ANONYMOUS.may_use("x")) == ("", False, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "pattern"),
        ({"name": "a/b"}, "pattern"),
        ({"name": "a" * 65}, "pattern"),
        ({"tenant": "x\n"}, "pattern"),
        ({"hash": "alice"}, "pattern"),
        ({"hash": "sha256:" + "A" * 64}, "pattern"),
        ({"key": "plain"}, "by their hash only"),
        ({"max_concurrent": 0}, "greater than or equal to 1"),
        ({"requests_per_minute": -1}, "greater than or equal to 1"),
        ({"tokens_per_minute": 10**13}, "less than or equal"),
        ({"expires": "2030-01-01T00:00:00"}, "timezone"),
        ({"priority": -5, "best_priority": 0}, "smaller than best_priority"),
        ({"models": ["m"] * 1_001}, "at most 1000"),
        ({"limit": 5}, "Extra inputs"),
    ],
)
def test_entries_with_a_mistake(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ApiKey.model_validate({"name": "alice", "hash": hash_of("alice")} | fields)


def test_both_kinds_of_files_say_the_same(tmp_path: Path) -> None:
    in_toml, in_json = tmp_path / "keys.toml", tmp_path / "keys.json"
    in_toml.write_text(TOML)
    keys = read_keys(in_toml)
    in_json.write_text(json.dumps({"keys": [key.model_dump(mode="json") for key in keys]}))
    assert read_keys(in_json) == keys
    alice, bob = keys
    assert (alice.owner, alice.tokens_per_minute, alice.models) == ("team-a", 100_000, ("smol-*", "big"))
    assert bob.disabled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "is wrong"),
        ("{}", "keys: Field required"),
        ('{"keys": 5}', "keys: "),
        ('{"keys": [5]}', r"keys\[0\]"),
        ('{"keys": [{"name": "a"}]}', r"keys\[0\]\.hash: Field required"),
        ('{"keys": [{"name": "a", "key": "plain-secret"}]}', r"keys\[0\]: keys are kept by their hash only"),
        ('{"keys": [], "more": 1}', "more: Extra"),
        (json.dumps({"keys": [{"name": "a", "hash": hash_of("a")}, {"name": "a", "hash": hash_of("b")}]}), "the name"),
        (json.dumps({"keys": [{"name": "a", "hash": hash_of("a")}, {"name": "b", "hash": hash_of("a")}]}), "the hash"),
    ],
)
def test_files_with_a_mistake(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_keys(path)
    assert "plain-secret" not in str(caught.value)
    with pytest.raises(ConfigurationError):
        KeyFile(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_keys(tmp_path / "none.toml")


def _write(path: Path, *names: str) -> None:
    """Writes as careful programs do: the file is there at any time, and is another one afterwards."""
    other = path.with_suffix(".new")
    other.write_text(json.dumps({"keys": [{"name": name, "hash": hash_of(name)} for name in names]}))
    other.replace(path)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "keys.json"
    _write(path, "alice")
    outcomes: list[str] = []
    keys = KeyFile(path, watch=FileWatch([path], clock=clock), reloaded=outcomes.append)
    _write(path, "bob")
    clock.now += 0.9
    assert keys.find(digest("alice")) is not None  # it is looked at once per second
    clock.now += 0.2
    assert keys.find(digest("alice")) is None
    assert keys.find(digest("bob")) is not None
    clock.now += 2
    assert keys.find(digest("bob")) is not None
    assert len(outcomes) == 1
    assert "has 1 API keys" in outcomes[0]

    path.write_text('{"keys": [')  # a mistake changes nothing, nor does a file that is gone for a while
    clock.now += 2
    assert keys.find(digest("bob")) is not None
    path.unlink()
    clock.now += 2
    assert keys.find(digest("bob")) is not None
    assert "stay as they were" in outcomes[-1]
    _write(path, "carol", "bob")
    clock.now += 2
    assert keys.find(digest("carol")) is not None
    assert len(outcomes) == 4


def test_a_signal_does_not_wait_for_the_next_look(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "keys.json"
    _write(path, "alice")
    outcomes: list[str] = []
    keys = KeyFile(path, watch=FileWatch([path], clock=clock), reloaded=outcomes.append)
    _write(path, "bob")
    keys.reload()
    assert keys.find(digest("bob")) is not None
    clock.now += 2
    assert keys.find(digest("bob")) is not None
    assert len(outcomes) == 1  # the next look finds nothing new


def test_a_link_that_points_elsewhere(tmp_path: Path, clock: Clock) -> None:
    link = tmp_path / "keys.json"
    for name in ("one", "two"):
        _write(tmp_path / f"{name}.json", name)
    link.symlink_to(tmp_path / "one.json")
    keys = KeyFile(link, watch=FileWatch([link], clock=clock))
    link.unlink()
    link.symlink_to(tmp_path / "two.json")
    clock.now += 2
    assert keys.find(digest("two")) is not None
