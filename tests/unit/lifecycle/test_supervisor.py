"""The supervisor in this process, over small real programs that play the services."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tercet_shared.lifecycle import supervisor
from tercet_shared.lifecycle.plan import RestartPolicy
from tercet_shared.lifecycle.process import Child
from tercet_shared.lifecycle.restarts import Restarts
from tests.fakes.processes import ended
from tests.unit.lifecycle.conftest import Stage, slow_answers

Make = Callable[..., Stage]
ORDER = ["front end", "core", "worker"]


async def test_announces_when_ready_and_stops_in_order(stage: Make) -> None:
    s = stage({"worker": "--progress 'loading weights' --log 'a line'"})
    run = asyncio.create_task(s.run())
    announced = await s.screen.shows("Tercet listens on http://127.0.0.1:")
    assert '"model": "played"' in announced
    assert "curl -N" in announced
    s.stop.asked.set()
    outcome = await run
    assert (outcome.code, outcome.message) == (0, None)
    assert s.noted("term") == ORDER
    assert s.noted("end") == ORDER
    notes = s.notes.read_text().splitlines()
    assert notes.index("end front end") < notes.index("term core")
    assert notes.index("end core") < notes.index("term worker")
    assert "worker: loading weights 0.5" in s.screen.lines
    assert "worker | a line" in s.screen.lines
    assert {f"{name}: ready" for name in ORDER} <= set(s.screen.lines)


@pytest.mark.parametrize("name", ORDER)
async def test_a_fatal_report_becomes_the_outcome(stage: Make, name: str) -> None:
    s = stage({name: "--fatal 'The weights are truncated.'"})
    outcome = await s.run()
    assert (outcome.code, outcome.message) == (1, "The weights are truncated.")


@pytest.mark.parametrize("name", ORDER)
async def test_a_killed_service_is_named_with_its_signal(stage: Make, name: str) -> None:
    s = stage()
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    os.kill(s.pids()[name], signal.SIGKILL)
    outcome = await run
    assert outcome.code == 1
    assert outcome.message is not None
    assert outcome.message.startswith(f"The {name} was killed by SIGKILL")
    assert s.noted("end") == [other for other in ORDER if other != name]


async def test_an_unexplained_exit_names_code_and_stage(stage: Make) -> None:
    s = stage({"core": "--progress 'waiting for the worker' --exit 3"})
    outcome = await s.run()
    assert outcome.code == 1
    assert outcome.message is not None
    assert "The core ended unexpectedly while waiting for the worker with exit code 3" in outcome.message


async def test_the_one_that_died_counts_not_the_one_that_complains(stage: Make, tmp_path: Path) -> None:
    # The core sees the end of its link before anybody can see that the worker's process has ended.
    link = tmp_path / "link"
    os.mkfifo(link)
    s = stage({"core": f"--loses {link}", "worker": f"--holds {link}"})
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    os.kill(s.pids()["worker"], signal.SIGKILL)
    outcome = await run
    assert outcome.message is not None
    assert outcome.message.startswith("The worker was killed by SIGKILL")


async def test_one_that_dies_after_somebody_has_complained_of_it_counts_all_the_same(
    stage: Make, tmp_path: Path
) -> None:
    # The worker's link is gone before the worker is, as where it takes long to die; here it dies after the core.
    link, core = tmp_path / "link", tmp_path / "core"
    for fifo in (link, core):
        os.mkfifo(fifo)
    s = stage({"core": f"--loses {link} --holds {core}", "worker": f"--holds {link} --follows {core}"})
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    os.kill(s.pids()["worker"], signal.SIGUSR1)
    outcome = await run
    assert outcome.message is not None
    assert outcome.message.startswith("The worker was killed by SIGKILL")


async def test_a_stubborn_service_is_killed_when_the_grace_is_over(stage: Make) -> None:
    s = stage({"core": "--stubborn"}, grace_s=0.2, margin_s=0.2)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    s.stop.asked.set()
    outcome = await run
    assert outcome.code == 0
    assert "core" not in s.noted("end")
    assert any("The core did not end in time" in line for line in s.screen.lines)


async def test_a_stubborn_service_does_not_keep_the_next_one_from_its_turn(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def turn(_insisted: object, child: Child, _timeout_s: float) -> None:
        if child.name != "core":  # whose time is over at once
            await child.exited.wait()

    monkeypatch.setattr(supervisor, "_first_of", turn)
    s = stage({"core": "--stubborn"})
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    s.stop.asked.set()
    assert (await run).code == 0
    assert s.noted("end") == ["front end", "worker"]
    assert [line for line in s.screen.lines if "in time" in line] == ["The core did not end in time and is killed."]


async def test_insisting_kills_at_once(stage: Make) -> None:
    s = stage(dict.fromkeys(ORDER, "--stubborn"), grace_s=3600)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    s.stop.asked.set()
    s.stop.insisted.set()
    assert (await asyncio.wait_for(run, 60)).code == 130


async def test_a_stop_while_starting_ends_everything(stage: Make) -> None:
    s = stage({"front end": "--unready"})
    run = asyncio.create_task(s.run())
    await s.screen.shows("worker: ready")
    s.stop.asked.set()
    assert (await run).code == 0
    assert not any("Tercet listens" in line for line in s.screen.lines)


async def test_a_front_end_that_never_becomes_ready_is_quoted(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_answers(monkeypatch)
    s = stage({"front end": "--unready"})
    outcome = await s.run()
    assert outcome.code == 1
    assert outcome.message == "The services have started, but /readyz still says: 503 no core"


async def test_what_a_service_started_ends_with_it(stage: Make) -> None:
    s = stage({"worker": "--orphan"})
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    orphan = os.pidfd_open(s.pids()["orphan"])
    s.stop.asked.set()
    await run
    await ended(orphan)


WORKER = {"worker": RestartPolicy(most=2, delay_s=0.01)}


async def restarted(s: Stage, count: int) -> int:
    """Waits until the worker was started again so many times and returns its process id."""
    async with asyncio.timeout(60):
        while sum("The worker is ready again." in line for line in s.screen.lines) < count:
            await s.screen.change()
    return s.pids()["worker"]


async def test_a_worker_that_was_ready_is_started_again(stage: Make) -> None:
    s = stage(restart=WORKER)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    os.kill(s.pids()["worker"], signal.SIGKILL)
    await restarted(s, 1)
    line = await s.screen.shows("It is started again.")
    assert line.startswith("The worker was killed by SIGKILL")
    s.stop.asked.set()
    outcome = await run
    assert (outcome.code, outcome.message) == (0, None)
    assert s.noted("term") == ORDER
    assert s.noted("end") == ORDER


async def test_too_many_deaths_within_the_window_are_a_failure(stage: Make) -> None:
    s = stage(restart=WORKER)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    for count in (1, 2):
        os.kill(s.pids()["worker"], signal.SIGKILL)
        await restarted(s, count)
    os.kill(s.pids()["worker"], signal.SIGKILL)
    outcome = await run
    assert outcome.code == 1
    assert outcome.message is not None
    assert outcome.message.startswith("The worker was killed by SIGKILL")
    assert outcome.message.endswith("It had been started again 2 times within 60 s.")


async def test_only_what_has_a_policy_is_started_again(stage: Make) -> None:
    s = stage(restart=WORKER)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    os.kill(s.pids()["core"], signal.SIGKILL)
    outcome = await run
    assert outcome.code == 1
    assert outcome.message is not None
    assert outcome.message.startswith("The core was killed by SIGKILL")


async def test_a_death_before_it_was_ever_ready_is_final(stage: Make) -> None:
    s = stage({"worker": "--progress loading --exit 3"}, restart=WORKER)
    outcome = await s.run()
    assert outcome.code == 1
    assert outcome.message is not None
    assert "while loading with exit code 3" in outcome.message


async def test_what_a_restarted_worker_says_is_final(stage: Make, tmp_path: Path) -> None:
    once = tmp_path / "once"
    s = stage({"worker": f"--fatal-if {once} 'The checkpoint is gone.'"}, restart=WORKER)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    once.touch()
    os.kill(s.pids()["worker"], signal.SIGKILL)
    outcome = await run
    assert (outcome.code, outcome.message) == (1, "The checkpoint is gone.")


async def test_a_worker_that_hangs_is_killed_and_started_again(stage: Make, tmp_path: Path) -> None:
    asks = tmp_path / "asks"
    os.mkfifo(asks)
    s = stage({"core": f"--asks {asks}"}, restart=WORKER)
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    first = s.pids()["worker"]
    os.kill(first, signal.SIGSTOP)
    with asks.open("w") as pipe:
        pipe.write(f"{first}\n")
        pipe.flush()
        second = await restarted(s, 1)
        assert second != first
        await s.screen.shows("The worker hung and was killed: It hangs. It is started again.")
        pipe.write(f"{first}\n{s.pids()['core']}\n")  # of the one before, and of one that is not to be restarted
        pipe.flush()
        await s.screen.shows("core | asked 3")
    assert s.pids()["worker"] == second
    s.stop.asked.set()
    assert (await run).code == 0
    assert s.noted("end") == ORDER


async def test_a_stop_while_a_restart_is_due_starts_nothing(stage: Make) -> None:
    s = stage(restart={"worker": RestartPolicy(delay_s=3600)})
    run = asyncio.create_task(s.run())
    await s.screen.shows("Tercet listens")
    os.kill(s.pids()["worker"], signal.SIGKILL)
    await s.screen.shows("It is started again.")
    s.stop.asked.set()
    assert (await run).code == 0
    assert s.noted("end") == ["front end", "core"]


def test_restarts_are_counted_within_a_window_and_delays_grow() -> None:
    restarts = Restarts(RestartPolicy(most=3, window_s=60, delay_s=0.5))
    assert [restarts.next_delay_s(now) for now in (0, 1, 2)] == [0.5, 1, 2]
    assert restarts.next_delay_s(59) is None
    assert restarts.next_delay_s(60) == 2
    assert restarts.next_delay_s(200) == 0.5
