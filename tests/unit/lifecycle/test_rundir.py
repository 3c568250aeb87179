from __future__ import annotations

import os
from pathlib import Path

import pytest

from tercet_shared.errors import ConfigurationError
from tercet_shared.lifecycle.plan import LINK_SOCKET
from tercet_shared.lifecycle.rundir import MAX_SOCKET_PATH, RunDirectory, base_directory, remove_stale


def test_it_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        path = directory.path
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as first:
        with RunDirectory(tmp_path) as second:
            assert first.path != second.path
        assert first.path.is_dir()


def test_stale_ones_are_removed_and_others_are_not(tmp_path: Path) -> None:
    stale = tmp_path / "tercet-stale"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "link.sock").touch()
    foreign = tmp_path / "tercet-of-somebody"  # no lock file: not made here
    foreign.mkdir()
    (tmp_path / "tercet-link").symlink_to(foreign)
    (tmp_path / "tercet-file").touch()
    with RunDirectory(tmp_path) as used:
        remove_stale(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["tercet-of-somebody", "tercet-link", "tercet-file", used.path.name]
        )


def test_a_base_whose_sockets_would_have_too_long_a_path_is_refused_or_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    with pytest.raises(ConfigurationError, match="too long"):
        base_directory(deep, {})
    assert not deep.exists()
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    base = base_directory(None, {"XDG_RUNTIME_DIR": str(deep)})
    assert base == Path("/tmp")


def test_the_longest_base_that_is_taken_has_room_for_the_sockets(tmp_path: Path) -> None:
    taken = []
    for length in range(1, 100):
        try:
            taken.append(base_directory(tmp_path / ("x" * length), {}))
        except ConfigurationError:
            break
    with RunDirectory(taken[-1]) as directory:
        assert len(os.fsencode(directory.path / LINK_SOCKET)) <= MAX_SOCKET_PATH


def test_the_user_s_runtime_directory_comes_first(tmp_path: Path) -> None:
    assert base_directory(None, {"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path


def test_a_file_as_base_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"--run-dir .*exists"):
        base_directory(tmp_path / "file", {})
