"""The worker process: loads its model, joins a core, executes its plans, and looks for a core again when it is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tercet_shared.errors import LinkError, ProtocolError, TercetError
from tercet_shared.ipc.connect import Joined, connect
from tercet_shared.ipc.errors import LinkRejectedError, LinkUnavailableError
from tercet_shared.ipc.link import LEAVES
from tercet_shared.mtls import is_local, mutual_tls
from tercet_shared.telemetry.telemetry import Telemetry
from tercet_shared.wire.frames import decode_welcome, encode_hello
from tercet_worker.device_thread import DeviceThread
from tercet_worker.parallel.failures import LOST_CORE
from tercet_worker.session import Session
from tercet_worker.startup import Engine, load_engine
from tercet_worker.telemetry.metrics import WorkerMetrics
from tercet_worker.telemetry.observer import StepObserver
from tercet_worker.telemetry.traces import SlotTraces

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tercet_shared.config import WorkerSettings
    from tercet_shared.lifecycle.report import Reporter
    from tercet_shared.wire.step import CoreWelcome, WorkerHello

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_GRACE = 0.5
"""Seconds that a running step is given when the worker stops."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
"""Seconds between attempts to find a core: at first, and after doubling."""
_REJOIN_PATIENCE = 10.0
"""Seconds for which a worker that has served a core is refused in vain: the core may not have noticed the end of their
link yet, and takes nobody while it has a worker."""
_PROGRESS_STEP = 0.01


class _StopRequestedError(Exception):
    """The worker was told to stop while it was loading."""


async def serve(settings: WorkerSettings, reporter: Reporter, stop: asyncio.Event) -> None:
    """Runs the worker until ``stop`` is set.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigurationError: the settings cannot work.
        LinkError: the core refused the worker, or what answers at the socket is no core.
    """
    device = DeviceThread()
    loading = _LoadingReport(reporter)
    telemetry = Telemetry("tercet-worker", settings, ready=lambda: metrics.not_ready_reason())  # noqa: PLW0108  # made after it
    metrics = WorkerMetrics(telemetry.meter)
    observer = StepObserver(metrics, SlotTraces(telemetry.tracing))
    async with telemetry:
        device.start()
        try:
            engine = await _unless(stop, asyncio.wrap_future(device.submit(lambda: load_engine(settings, loading))))
            if engine is not None and not stop.is_set():  # both may have happened by the time that this runs
                metrics.loaded(engine)
                await _serve_cores(_door(settings), engine, device, reporter, stop, observer)
        finally:
            loading.cancel()
            device.stop(_STOP_GRACE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Door:
    """Where cores are found, for people, and what joins one there with a hello."""

    address: str
    join: Callable[[bytes], Coroutine[Any, Any, Joined]]


def _door(settings: WorkerSettings) -> _Door:
    """Returns the socket of a core on this host, or the address of one on another.

    Raises:
        ConfigurationError: there are certificates, and they cannot be used.
    """
    address = settings.core_address
    if address is None:
        return _Door(str(settings.link), partial(connect, settings.link))
    from tercet_shared.ipc.connect_remote import connect_remote  # noqa: PLC0415  # gRPC is of no use to the others

    tls = None if is_local(address) else mutual_tls(settings)
    return _Door(address, lambda hello: connect_remote(address, hello, tls, tls_name=settings.mtls_name))


async def _serve_cores(
    door: _Door, engine: Engine, device: DeviceThread, reporter: Reporter, stop: asyncio.Event, observer: StepObserver
) -> None:
    """Serves one core after another until ``stop`` is set; weights stay, requests and incarnation do not.

    A rank of a group serves one core: when their links close, ranks may be in different steps, in which each waits for
    the others, so they end and are started again as a whole.
    """
    reporter.progress("connecting to the core")
    ready = False
    topology = engine.communicator.topology
    while not stop.is_set():
        offer = dataclasses.replace(engine.offer, incarnation=uuid.uuid4().hex)
        joined = await _join(door, offer, stop, _REJOIN_PATIENCE if ready or topology.ranks > 1 else 0.0)
        if joined is None:
            return
        connection, goodbye = joined.connection, "the worker failed"
        try:
            welcome = _check_welcome(decode_welcome(joined.reply), offer)
            if not ready:
                reporter.ready(model=offer.model_name, dtype=offer.dtype, device=offer.device, blocks=offer.num_blocks)
                ready = True
            logger.info("joined core %s at %s", welcome.core_id, door.address)
            session = Session(connection, engine.runner, device, welcome.pipeline_depth, observer, topology)
            reason = await _unless(stop, session.run())
            goodbye = LEAVES
        except TercetError as error:
            goodbye = error.message
            raise
        finally:
            await connection.close(goodbye)
        if reason is None:
            return
        if topology.ranks > 1:
            raise LinkError(f"{LOST_CORE}, which ends the group: {reason.text}")
        logger.warning("the link to the core is closed: %s; looking for a core again", reason.text)
        # Queued behind the steps that still run, and awaited, so that the next core finds empty slots.
        await asyncio.wrap_future(device.submit(engine.runner.reset))


async def _join(door: _Door, offer: WorkerHello, stop: asyncio.Event, patience_s: float) -> Joined | None:
    """Connects as soon as a core listens; returns None when ``stop`` comes first.

    A core that refuses the worker is asked again for ``patience_s`` seconds.

    There is no event for "a socket appeared at this path" that holds on every file system, so it is tried again after a
    growing delay; nothing waits for it but this worker.
    """
    delay = _FIRST_DELAY
    clock = asyncio.get_running_loop().time
    patient_until = clock() + patience_s
    quiet = False  # whether it was said that there is no core
    while not stop.is_set():
        try:
            return await _unless(stop, door.join(encode_hello(offer)))
        except LinkUnavailableError as error:
            if delay == _LONGEST_DELAY and not quiet:  # else it is about to come
                logger.info("%s; looking on", error.message)
                quiet = True
        except LinkRejectedError as error:
            if clock() >= patient_until:
                raise LinkError(f"The core at {door.address} refused this worker: {error.message}") from error
            logger.info(
                "the core at %s refuses this worker: %s; next attempt in %.2f s", door.address, error.message, delay
            )
        await _unless(stop, asyncio.sleep(delay))
        delay = min(2 * delay, _LONGEST_DELAY)
    return None


def _check_welcome(welcome: CoreWelcome, offer: WorkerHello) -> CoreWelcome:
    for name in ("max_slots", "max_model_len", "max_batched_tokens"):
        accepted, offered = getattr(welcome, name), getattr(offer, name)
        if not 1 <= accepted <= offered:
            raise ProtocolError(f"The core accepts a {name} of {accepted}; the worker offered {offered}.")
    if welcome.pipeline_depth < 1:
        raise ProtocolError(f"The core states a pipeline depth of {welcome.pipeline_depth}.")
    return welcome


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T | None:
    """Returns the result of ``work``, or None after cancelling it when ``stop`` is set first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.wait((task, stopped))
        if task.done() and not task.cancelled():
            task.exception()  # what came too late is nobody's concern, and no "never retrieved" in the log


class _LoadingReport:
    """Passes progress on from the device thread, a hundred times at most, and ends the loading once it is cancelled."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._cancelled = threading.Event()
        self._last = 0.0

    def cancel(self) -> None:
        """Makes the next report raise."""
        self._cancelled.set()

    def __call__(self, stage: str, fraction: float | None) -> None:
        """Reports ``stage``; raises where the loading was cancelled."""
        if self._cancelled.is_set():
            raise _StopRequestedError
        if fraction is None:
            self._reporter.progress(stage)
        elif fraction >= 1 or fraction - self._last >= _PROGRESS_STEP:
            self._last = fraction
            self._reporter.progress(stage, fraction)
