"""Who may listen where."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from tercet_shared.errors import ConfigurationError
from tercet_shared.ipc.connect import connect
from tercet_shared.ipc.listener import LinkListener
from tercet_shared.ipc.settings import ListenerSettings

from .conftest import Peer, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_socket_and_its_directory_are_private(path: Path) -> None:
    with LinkListener(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == []


def test_a_group_may_be_given_by_number_or_name(path: Path) -> None:
    group = os.getgid()
    for name in (group, grp.getgrgid(group).gr_name):
        with LinkListener(path, ListenerSettings(group=name)):
            assert path.stat().st_gid == group
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


def test_an_unknown_group_is_an_error_that_leaves_nothing(path: Path, descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()
    with pytest.raises(ConfigurationError, match="cannot be given to a group: no such group"):
        LinkListener(path, ListenerSettings(group="no-such-group-here")).open()
    assert list(path.parent.iterdir()) == []
    assert not descriptors() - before


async def test_a_second_listener_on_a_live_socket_is_refused_and_harms_nothing(path: Path) -> None:
    async with serving(path) as core:
        with pytest.raises(ConfigurationError, match="another process already listens on"):
            LinkListener(path).open()
        joined = await connect(path, b"")
        assert (await core.connection()).close_reason is None
        await joined.connection.close()


async def test_a_listener_in_another_process_is_respected(path: Path, descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()
    with Peer("core", str(path), "asyncio") as core:
        assert await core.line() == "listening"
        with pytest.raises(ConfigurationError, match="another process already listens on"):
            LinkListener(path).open()
        await connect_and_close(path)
    assert not descriptors() - before


async def connect_and_close(path: Path) -> None:
    await (await connect(path, b"")).connection.close()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with LinkListener(path):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(path))
        client.close()


def test_a_lock_file_removed_between_open_and_lock_does_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_path = path.with_name("link.sock.lock")
    flock = fcntl.flock
    calls: list[int] = []

    def remove_once(fd: int, operation: int) -> None:
        if not calls and lock_path.exists():
            calls.append(fd)
            lock_path.unlink()  # the holder before us ends at this very moment
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_once)
    with LinkListener(path):
        assert len(calls) == 1
        with pytest.raises(ConfigurationError, match="another process"):
            LinkListener(path).open()


def test_something_else_at_the_path_is_not_touched(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="exists and is not a socket"):
        LinkListener(path).open()
    assert path.read_text() == "precious"
    assert [entry.name for entry in path.parent.iterdir()] == ["link.sock"]


@pytest.mark.parametrize("length", [108, 200])
async def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("ü" * length)
    path = path.with_name(path.name.encode()[: length - len(os.fsencode(tmp_path)) - 1].decode("utf-8", "ignore"))
    path = path.with_name(path.name + "x" * (length - len(os.fsencode(path))))
    assert len(os.fsencode(path)) == length
    with pytest.raises(ConfigurationError, match=f"has {length} bytes; a Unix socket allows 107"):
        LinkListener(path).open()
    with pytest.raises(ConfigurationError, match=f"has {length} bytes"):
        await connect(path, b"")


def test_the_longest_path_works(tmp_path: Path) -> None:
    path = tmp_path / ("x" * (107 - len(os.fsencode(tmp_path)) - 1))
    with LinkListener(path):
        assert path.is_socket()


def test_a_directory_that_everyone_can_write_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(ConfigurationError, match="can be written by everyone"):
        LinkListener(path).open()
    path.parent.chmod(0o1777)  # as /tmp: others cannot replace the socket
    with LinkListener(path):
        assert path.is_socket()


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot listen on .*: (Not a directory|File exists)"):
        LinkListener(tmp_path / "file" / "link.sock").open()
