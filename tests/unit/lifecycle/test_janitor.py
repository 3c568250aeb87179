"""What the janitor of a killed process removes, what it leaves alone, and what it holds."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tercet_shared.lifecycle.janitor import Janitor
from tercet_shared.lifecycle.rundir import RunDirectory
from tests.fakes.processes import ended, runs

AWKWARD = """-rf * $(id) "q" 'x'\nend"""


def _started(janitor: Janitor) -> int:
    """Starts it and returns a descriptor of its process."""
    janitor.start()
    assert janitor.pid is not None
    return os.pidfd_open(janitor.pid)


async def _owner_ends(janitor: Janitor, process: int) -> None:
    """Does what the kernel does when the owner ends, and waits until the janitor has done its work."""
    os.close(janitor._pipe)
    janitor._pipe = -1
    await ended(process)
    janitor.dismiss()


async def test_a_directory_goes_with_all_that_is_in_it_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    path = tmp_path / AWKWARD
    (path / "deep" / "er").mkdir(parents=True)
    (path / "deep" / "er" / AWKWARD).touch()
    (path / "to a directory").symlink_to(kept)
    (path / "to a file").symlink_to(kept / "file")
    (path / "to nothing").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path / "s"))
    janitor = Janitor.of_directory(path)
    await _owner_ends(janitor, _started(janitor))
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").read_text() == "precious"


async def test_a_link_in_the_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    janitor = Janitor.of_directory(tmp_path / "link")
    await _owner_ends(janitor, _started(janitor))
    assert (tmp_path / "kept" / "file").exists()


async def test_it_waits_until_nobody_holds_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a service that takes long to end
    janitor = Janitor.of_directory(path)
    process = _started(janitor)
    work = asyncio.create_task(_owner_ends(janitor, process))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(work), 0.3)
    (path / "late").touch()
    os.close(lock)
    await work
    assert list(tmp_path.iterdir()) == []


async def test_signals_to_its_owner_s_group_and_to_itself_do_not_end_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    janitor = Janitor.of_directory(path)
    process = _started(janitor)
    assert janitor.pid is not None
    assert os.getsid(janitor.pid) == os.getpgid(janitor.pid) == janitor.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(janitor.pid, number)  # while its interpreter starts, too
    await _owner_ends(janitor, process)
    assert not path.exists()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked


def test_it_holds_one_end_of_one_pipe_of_its_owner(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)  # as standard output is
    with Janitor.of_directory(tmp_path / "nothing") as janitor:
        assert janitor.pid is not None
        held = _files_of(janitor.pid)
        assert (held["1"], held["2"]) == ("/dev/null", "/dev/null")
        assert sum(file.startswith("pipe:") for file in held.values()) == 1
        os.close(writing)
        assert os.read(reading, 1) == b"", "the reader of the owner's output still waits"
    os.close(reading)


def _files_of(pid: int) -> dict[str, str]:
    """Returns what a process has open, by number; it may open and close files meanwhile."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[entry.name] = str(entry.readlink())
    return found


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_is_dismissed_removes_nothing_and_is_gone(tmp_path: Path, stopped: bool) -> None:
    with Janitor.of_directory(tmp_path) as janitor:
        pid = janitor.pid
        assert pid is not None
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    assert not runs(pid)
    assert janitor.pid is None
    assert tmp_path.exists()
    janitor.dismiss()


def test_without_an_interpreter_to_start_all_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with caplog.at_level(logging.DEBUG), RunDirectory(tmp_path) as directory:
        assert directory.path.is_dir()
    ours = [record for record in caplog.records if record.name.startswith("tercet_shared.lifecycle")]
    assert [record.levelname for record in ours] == ["DEBUG"]
    assert "no janitor can be started" in ours[0].message
    assert list(tmp_path.iterdir()) == []


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


async def test_sockets_go_with_their_lock_files_where_these_bear_the_mark(run_dir: Path) -> None:
    names = ["-f", "a b", "q'\"", "of another", "without lock"]
    paths = [run_dir / name for name in names]
    for path in paths:
        _bound(path)
        path.with_name(path.name + ".lock").write_text("mine")
    paths[3].with_name("of another.lock").write_text("theirs")
    paths[4].with_name("without lock.lock").unlink()
    janitor = Janitor.of_sockets([(path, "mine") for path in (*paths, run_dir / "nothing", run_dir / "no" / "thing")])
    await _owner_ends(janitor, _started(janitor))
    assert sorted(entry.name for entry in run_dir.iterdir()) == ["of another", "of another.lock", "without lock"]


async def test_what_is_no_socket_stays(run_dir: Path) -> None:
    _bound(run_dir / "target")
    (run_dir / "link").symlink_to(run_dir / "target")
    (run_dir / "file").touch()
    for name in ("link", "file"):
        (run_dir / f"{name}.lock").write_text("mine")
    (run_dir / "held").write_text("mine")
    _bound(run_dir / "locked by a link")
    (run_dir / "locked by a link.lock").symlink_to(run_dir / "held")
    janitor = Janitor.of_sockets((run_dir / name, "mine") for name in ("link", "file", "locked by a link"))
    await _owner_ends(janitor, _started(janitor))
    assert sorted(entry.name for entry in run_dir.iterdir()) == [
        "file", "held", "link", "locked by a link", "locked by a link.lock", "target",
    ]  # fmt: skip
