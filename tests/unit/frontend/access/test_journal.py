"""Logs of JSON lines."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import orjson
import pytest

from tercet_frontend.access.exchange import Exchange
from tercet_frontend.access.journal import Journal
from tercet_frontend.access.notes import Notes
from tercet_shared.errors import ConfigurationError
from tests.unit.frontend.access.conftest import make_key

TIMEOUT = 60.0


def lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_lines_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    journal = Journal(path)
    for number in range(5_000):
        journal.write({"number": number, "text": "a\nb"})
    journal.close(TIMEOUT)
    assert [line["number"] for line in lines(path)] == list(range(5_000))
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0
    assert journal.dropped == 0


def test_a_file_that_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    journal = Journal(path)
    journal.write({"number": 1})
    path.rename(tmp_path / "log.1")
    journal.write({"number": 2})
    journal.reopen()
    journal.write({"number": 3})
    journal.close(TIMEOUT)
    assert [line["number"] for line in lines(tmp_path / "log.1")] == [1, 2]
    assert [line["number"] for line in lines(path)] == [3]


def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    journals = [Journal(path), Journal(path)]
    for number in range(2_000):
        journals[number % 2].write({"number": number})
    for journal in journals:
        journal.close(TIMEOUT)
    assert sorted(int(str(line["number"])) for line in lines(path)) == list(range(2_000))


def test_a_reader_that_reads_nothing_costs_lines_and_no_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    journal = Journal(path, max_queued=10)
    for number in range(5_000):
        journal.write({"number": number, "text": "x" * 1_000})
    assert journal.dropped > 4_000
    journal.close(timeout=0)
    os.close(reader)


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    journal = Journal(path)
    journal.write({"number": 1})
    journal.close(TIMEOUT)
    assert journal.dropped == 1
    assert "No space left" in caplog.text


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        Journal(tmp_path / "none" / "log")


def test_what_is_noted_of_a_request(tmp_path: Path) -> None:
    access, audit = Journal(tmp_path / "access"), Journal(tmp_path / "audit")
    notes = Notes(access, audit)
    exchange = Exchange(request_id="r", client="192.0.2.1", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    exchange.key = make_key(tenant="team")
    exchange.model, exchange.target = "smol", "smol-2"
    exchange.used(5, 7, ["stop"])
    for status, public in ((200, False), (401, False), (500, False), (200, True)):
        notes.request(
            exchange, method="POST", path="/" + "x" * 500, status=status, seconds=0.25, sent_bytes=9, public=public
        )
    notes.event("keys", "Read again.")
    notes.close()
    entry = lines(tmp_path / "access")[0]
    assert str(entry.pop("time")).endswith("Z")
    assert len(str(entry.pop("path"))) == 200
    assert entry == {
        "request_id": "r", "trace_id": "a" * 32, "method": "POST", "status": 200, "duration": 0.25, "bytes": 9,
        "tenant": "team", "key": "alice", "client": "192.0.2.1", "model": "smol", "served_model": "smol-2",
        "prompt_tokens": 5, "output_tokens": 7, "finish_reasons": ["stop"], "error": None,
    }  # fmt: skip
    assert len(lines(tmp_path / "access")) == 4
    audited = lines(tmp_path / "audit")
    assert [(line["event"], line.get("outcome")) for line in audited] == [
        ("request", "allowed"), ("request", "refused"), ("request", "failed"), ("keys", None),
    ]  # fmt: skip
