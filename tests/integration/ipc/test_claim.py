"""Sockets of a process that is killed go; those of whoever comes after it on the same paths stay, however late."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tercet_shared.errors import ConfigurationError
from tercet_shared.ipc.claim import SocketClaim
from tercet_shared.ipc.listener import LinkListener
from tercet_shared.lifecycle.sweeper import turn

from .conftest import PATIENCE_S, names_in

if TYPE_CHECKING:
    from collections.abc import Iterator


class Claimant:
    """A process that listens on paths and has a janitor."""

    def __init__(self, *paths: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("claimant.py")), *map(str, paths)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.janitor = int(self.process.stdout.readline())
        self._janitor = os.pidfd_open(self.janitor)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def tidied(self) -> None:
        """Waits for the end of the janitor."""
        ended = select.poll()
        ended.register(self._janitor, select.POLLIN)
        assert ended.poll(PATIENCE_S * 1000)

    def close(self) -> None:
        self.kill()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._janitor, signal.SIGKILL)
        os.close(self._janitor)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def claimant(*paths: Path) -> Iterator[Claimant]:
    running = Claimant(*paths)
    try:
        yield running
    finally:
        running.close()


def assert_listens(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_killed_process_leaves_neither_sockets_nor_lock_files(path: Path) -> None:
    other = path.with_name("-rf 'q\" other.sock")
    with claimant(path, other) as killed:
        assert names_in(path.parent) == sorted([path.name, path.name + ".lock", other.name, other.name + ".lock"])
        killed.kill()
        killed.tidied()
    assert names_in(path.parent) == []


def test_a_relative_path_is_the_one_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with claimant(Path("run/link.sock")) as killed:
        assert names_in(tmp_path / "run") == ["link.sock", "link.sock.lock"]
        killed.kill()
        killed.tidied()
    assert names_in(tmp_path / "run") == []


def test_one_that_ends_by_itself_leaves_no_janitor(path: Path) -> None:
    with claimant(path) as running:
        running.process.send_signal(signal.SIGUSR1)
        assert running.process.wait(PATIENCE_S) == 0
        running.tidied()
    assert names_in(path.parent) == []


def test_a_janitor_that_comes_late_leaves_the_next_one_s_socket_alone(path: Path) -> None:
    with claimant(path) as killed:
        os.kill(killed.janitor, signal.SIGSTOP)
        killed.kill()
        with LinkListener(path):
            os.kill(killed.janitor, signal.SIGCONT)
            killed.tidied()
            assert_listens(path)
            assert names_in(path.parent) == ["link.sock", "link.sock.lock"]
    assert names_in(path.parent) == []


def test_nobody_takes_a_path_while_a_janitor_is_at_work_on_it(path: Path) -> None:
    """Otherwise it could lose its socket between what the janitor has seen and what it does."""
    with claimant(path) as killed:
        os.kill(killed.janitor, signal.SIGKILL)
        killed.kill()
    claim = SocketClaim(path)
    taking = threading.Thread(target=claim.take)
    with turn(str(path)):
        taking.start()
        taking.join(0.3)
        assert taking.is_alive()
        path.unlink()
        path.with_name("link.sock.lock").unlink()
    taking.join(PATIENCE_S)
    assert path.with_name("link.sock.lock").read_text() == claim.mark
    claim.release()
    assert names_in(path.parent) == []


def test_starting_again_at_once_works_every_time(path: Path) -> None:
    for _ in range(8):
        with claimant(path) as killed:
            killed.kill()
            with LinkListener(path):
                killed.tidied()
                assert_listens(path)
        assert names_in(path.parent) == []


def test_a_killed_process_that_was_refused_harms_nothing(path: Path) -> None:
    with LinkListener(path) as listener:
        refused = Path(__file__).with_name("claimant.py")
        done = subprocess.run([sys.executable, str(refused), str(path)], capture_output=True, text=True, check=False)
        assert "another process already listens on" in done.stderr
        assert_listens(path)
        assert path.with_name("link.sock.lock").read_text() == listener.claim.mark


def test_a_socket_on_which_a_program_without_a_claim_listens_is_not_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen(8)
        with pytest.raises(ConfigurationError, match="another process already listens on"):
            SocketClaim(path).take()
        assert_listens(path)
        assert names_in(path.parent) == ["link.sock"]
    with SocketClaim(path):
        assert names_in(path.parent) == ["link.sock.lock"]


def test_a_claim_may_be_released_twice_and_taken_again(path: Path) -> None:
    path.parent.mkdir()
    claim = SocketClaim(path)
    for _ in range(2):
        claim.take()
        with pytest.raises(ConfigurationError, match="another process already listens on"):
            SocketClaim(path).take()
        claim.release()
        claim.release()
    assert names_in(path.parent) == []
