"""Several ranks of one worker as processes, without a core: plans in, the answering rank's results out.

`Ranks` stands where a `Driver` expects a runner, so that what is tried on one rank is tried on many unchanged.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np

from tercet_shared.config import WorkerSettings, parse
from tercet_shared.wire.frames import decode_from_core, decode_result, encode_plan, encode_result
from tercet_shared.wire.step import StepPlan, StepResult
from tercet_worker.sampling import GrammarSource
from tercet_worker.startup import load_engine
from tercet_worker.state.checks import PlanLimits

_WAIT_S = 200.0
"""Seconds that a rank may take for anything, its start on a busy machine included: each loads torch and a model."""


def _serve(pipe: Connection, argv: list[str], listener: Any) -> None:
    """Runs one rank: its first message says what it offers, then every message is a step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if listener is not None:
        argv = [*argv, f"--rendezvous-fd={listener.detach()}"]
    try:
        engine = load_engine(parse(WorkerSettings, argv), lambda _stage, _fraction: None)
    except Exception as error:  # noqa: BLE001  # the test judges it
        pipe.send(error)
        return
    pipe.send((engine.offer, engine.runner.limits, engine.weight_bytes))
    while (message := pipe.recv()) is not None:
        if message == "reset":
            engine.runner.reset()
            continue
        frame, mask = message
        plan = decode_from_core(frame)
        assert isinstance(plan, StepPlan)
        try:
            result = engine.runner.execute(plan, None if mask is None else lambda words=mask: words).result()
        except Exception as error:  # noqa: BLE001  # the test judges it
            pipe.send(error)
            continue
        pipe.send(encode_result(result))
    engine.communicator.close()


@dataclass
class Waiting:
    """A step that all ranks were given."""

    ranks: Ranks
    step_id: int

    def result(self) -> StepResult:
        return self.ranks.land(self.step_id)


class Ranks:
    """The parent's end."""

    def __init__(self, pipes: list[Connection], processes: list[Any]) -> None:
        self.pipes = pipes
        self.processes = processes
        first: list[Any] = [self._receive(rank) for rank in range(len(pipes))]
        for found in first:
            if isinstance(found, Exception):
                raise found
        self.offers = [found[0] for found in first]
        self.limits: PlanLimits = first[0][1]
        self.weight_bytes: list[int] = [found[2] for found in first]
        (self.answering,) = (rank for rank, offer in enumerate(self.offers) if offer.answers)
        self._landed: dict[int, StepResult] = {}
        self._under_way: deque[int] = deque()

    def execute(self, plan: StepPlan, grammar: GrammarSource | None = None) -> Waiting:
        mask = None if grammar is None else np.array(grammar())
        for pipe in self.pipes:
            pipe.send((encode_plan(plan), mask))
        self._under_way.append(plan.step_id)
        return Waiting(self, plan.step_id)

    def land(self, step_id: int) -> StepResult:
        while step_id not in self._landed:
            landing = self._under_way.popleft()
            found = [self._receive(rank) for rank in range(len(self.pipes))]
            errors = [one for one in found if isinstance(one, Exception)]
            if errors:
                assert len({str(error) for error in errors}) == 1
                assert len(errors) == len(found), "all ranks refuse a plan alike"
                raise errors[0]
            self._landed[landing] = decode_result(found[self.answering])
        return self._landed.pop(step_id)

    def reset(self) -> None:
        for pipe in self.pipes:
            pipe.send("reset")

    def _receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(_WAIT_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()


@contextmanager
def ranks_of(
    model: Path, tensor: int, pipeline: int, *flags: str, of_rank: Mapping[int, tuple[str, ...]] | None = None
) -> Iterator[Ranks]:
    """Starts the ranks of one group; some may have flags of their own."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for rank in range(tensor * pipeline):
            ours, theirs = context.Pipe()
            argv = [
                str(model), "--threads=1", f"--tensor-parallel-size={tensor}", f"--pipeline-parallel-size={pipeline}",
                f"--rendezvous={address}", f"--local-rank={rank}", f"--rendezvous-timeout={_WAIT_S:g}", *flags,
                *(of_rank or {}).get(rank, ()),
            ]  # fmt: skip
            passed = DupFd(listener.fileno()) if rank == 0 else None
            process = context.Process(target=_serve, args=(theirs, argv, passed), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
    try:
        yield Ranks(pipes, processes)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(_WAIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join(_WAIT_S)
