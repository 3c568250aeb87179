"""The device thread: strict order, errors to whoever waits, a bounded stop."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tercet_worker.device_thread import DeviceThread


def test_work_runs_in_order_on_one_thread() -> None:
    device = DeviceThread()
    device.start()
    seen: list[tuple[int, int]] = []
    futures = [device.submit(lambda n=number: seen.append((n, threading.get_ident()))) for number in range(50)]
    futures[-1].result(20)
    assert [number for number, _ in seen] == list(range(50))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1
    assert device.stop(20)


def test_an_error_goes_to_its_future_and_the_thread_goes_on() -> None:
    device = DeviceThread()
    device.start()
    with pytest.raises(ZeroDivisionError):
        device.submit(lambda: 1 // 0).result(20)
    assert device.submit(lambda: 5).result(20) == 5
    assert device.stop(20)


def test_cancelled_work_does_not_run() -> None:
    device = DeviceThread()
    seen: list[int] = []
    future = device.submit(lambda: seen.append(1))
    assert future.cancel()
    device.start()
    assert device.stop(20)
    assert seen == []


def test_stop_does_not_wait_for_ever() -> None:
    device = DeviceThread()
    device.start()
    release = threading.Event()
    device.submit(release.wait)
    assert not device.stop(0.01)
    release.set()


def test_a_process_ends_with_its_code_while_the_device_works() -> None:
    code = (
        "import threading\n"
        "from tercet_worker.device_thread import DeviceThread, end_process\n"
        "device = DeviceThread(); device.start(); device.submit(threading.Event().wait)\n"
        "assert not device.stop(0.01)\n"
        "print('last words')\n"
        "end_process(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, b"last words\n")
