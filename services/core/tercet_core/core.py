"""The core's life: listen, wait for the worker, run the engine, drain, leave."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import secrets
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tercet_core.dumps import StepDumps
from tercet_core.engine import Engine
from tercet_core.grammar.service import GrammarService
from tercet_core.links.gate import WorkerGate
from tercet_core.metrics import CoreMetrics, observe_registry
from tercet_core.observer import Observer
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_core.service import EngineService, HealthChecks, claim_of, make_server
from tercet_core.tracing import RequestTraces
from tercet_core.watchdog import Watchdog
from tercet_shared.errors import TercetError, UnavailableError
from tercet_shared.ipc.listener import LinkListener
from tercet_shared.ipc.remote_listener import RemoteListener
from tercet_shared.ipc.settings import HeartbeatSettings, ListenerSettings
from tercet_shared.lifecycle.janitor import Janitor
from tercet_shared.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from tercet_core.engine import Loss
    from tercet_core.links.gate import AnyLink
    from tercet_core.membership import Membership
    from tercet_shared.config import CoreSettings
    from tercet_shared.lifecycle.report import Reporter
    from tercet_shared.registry.blocks import BlockLog
    from tercet_shared.wire.step import CoreWelcome, WorkerHello

_log = logging.getLogger(__name__)


async def serve(settings: CoreSettings, reporter: Reporter, stop: asyncio.Event) -> None:
    """Runs the core until ``stop`` is set.

    Raises:
        ConfigurationError: an address cannot be used.
        LinkError: no worker came, or workers were lost too often.
        TercetError: the watchdog found the engine stuck.
    """
    heartbeat = HeartbeatSettings(settings.heartbeat_interval, settings.heartbeat_timeout)
    links = ListenerSettings(heartbeat=heartbeat)
    listener = LinkListener(settings.link, links)
    address = claim_of(settings.listen)
    with ExitStack() as files:
        if settings.report_fd is None:  # else the supervisor's janitor removes the whole run directory
            claims = [listener.claim] if address is None else [listener.claim, address]
            files.enter_context(Janitor.of_sockets((claim.path, claim.mark) for claim in claims))
        if address is not None:
            files.enter_context(address)
        await _serve(settings, reporter, stop, listener, links)


async def _serve(
    settings: CoreSettings, reporter: Reporter, stop: asyncio.Event, listener: LinkListener, links: ListenerSettings
) -> None:
    core_id = settings.core_id or f"core-{secrets.token_hex(4)}"
    service = EngineService(core_id, settings)
    membership = _membership(settings, service)
    gate = WorkerGate(core_id, settings)
    server, checks = make_server(service, RemoteListener(gate.judge, gate.admit, links), settings)
    telemetry = Telemetry(
        "tercet-core",
        settings,
        instance=core_id,
        alive=service.not_live_reason,
        ready=service.not_ready_reason,
    )
    observer = Observer(CoreMetrics(telemetry.meter, service), RequestTraces(telemetry.tracing, core_id))
    observe_registry(telemetry.meter, membership)
    service.observe(observer)
    async with telemetry:
        with listener:
            await checks.set_serving(serving=False)
            await checks.set_live(live=True)
            await server.start()
            accepting = asyncio.create_task(listener.serve(gate.judge, gate.admit), name="accept workers")
            life = asyncio.create_task(
                _live(settings, reporter, service, membership, checks, gate, observer, stop), name="core"
            )
            try:
                reporter.progress("waiting for the worker")
                tasks: set[asyncio.Task[None]] = {accepting, life}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in (life, accepting):
                    if task.done():
                        task.result()
            finally:
                for task in (life, accepting):
                    task.cancel()
                await asyncio.gather(life, accepting, return_exceptions=True)
                await membership.leave()
                service.close_streams()
                await gate.close("the core stops")  # before the server, on which some of its links are
                await server.stop(grace=1.0)
                observer.close()


class NoMembership:
    """The membership of a core that front ends know by its address."""

    healthy = True
    failures = 0

    def join(self, blocks: BlockLog) -> None:
        """Registers nowhere."""

    async def leave(self) -> None:
        """Has nothing to leave."""


def _membership(settings: CoreSettings, service: EngineService) -> Membership | NoMembership:
    if settings.redis_url is None:
        return NoMembership()
    from tercet_core.membership import Membership  # noqa: PLC0415  # takes 0.3 s, and one machine needs no Redis

    return Membership(settings.redis_url, settings, service)


class _Succession:
    """Finds the worker that follows a lost one, and tells everybody; see `Workers`."""

    def __init__(self, gate: WorkerGate, service: EngineService, reporter: Reporter, pid: int) -> None:
        self._gate = gate
        self._service = service
        self._reporter = reporter
        self._pid = pid  # of the current worker, or of what started its ranks, as it sees itself

    async def following(self, loss: Loss) -> AnyLink:
        if loss.hangs:
            self._reporter.restart("worker", self._pid, loss.reason)
        link = await self._gate.worker()
        self._pid = link.hello.pid
        self._service.renew(link.hello)
        _log.info("worker %d takes over", self._pid)
        return link


async def _live(
    settings: CoreSettings,
    reporter: Reporter,
    service: EngineService,
    membership: Membership | NoMembership,
    checks: HealthChecks,
    gate: WorkerGate,
    observer: Observer,
    stop: asyncio.Event,
) -> None:
    stopping = asyncio.create_task(stop.wait(), name="wait for the stop")
    joining = asyncio.create_task(gate.worker(), name="wait for the worker")
    try:
        events: set[asyncio.Task[Any]] = {joining, stopping}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        link = joining.result()
        guides = GrammarService(settings.model, settings.revision, link.hello)
        engine = Engine(
            Scheduler(_scheduler_limits(settings, link.hello, gate.limits), policy=settings.policy),
            service.publish,
            _Succession(gate, service, reporter, link.hello.pid),
            StepDumps(settings.dump_dir, gate.limits.core_id),
            depth=gate.limits.pipeline_depth,
            max_losses=settings.worker_failures,
            step_timeout_s=settings.step_timeout,
            guides=guides,
            observer=observer,
        )
        service.attach(engine, link.hello, gate.limits)
        membership.join(service.block_log())
        try:
            await _run(settings, reporter, service, checks, engine, link, stopping)
        finally:
            await guides.close()
    finally:
        for task in (stopping, joining):
            task.cancel()
        await asyncio.gather(stopping, joining, return_exceptions=True)


async def _run(
    settings: CoreSettings,
    reporter: Reporter,
    service: EngineService,
    checks: HealthChecks,
    engine: Engine,
    link: AnyLink,
    stopping: asyncio.Task[Any],
) -> None:
    """Runs the engine until it is to stop or fails; raises what it failed with."""
    stuck: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    watchdog = Watchdog(
        engine, settings.watchdog, on_stuck=stuck.set_result, on_hang=lambda text: _end_process(reporter, text)
    )
    running = asyncio.create_task(engine.run(link), name="engine")
    watching = asyncio.create_task(watchdog.run(), name="watchdog")
    showing = asyncio.create_task(_show_readiness(service, checks), name="readiness")
    try:
        await checks.set_serving(serving=True)
        reporter.ready(core=service.core_id)
        turns: set[asyncio.Future[Any]] = {running, watching, stopping, stuck}
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, watching):
            if task.done():
                task.result()
        await checks.set_serving(serving=False)
        if stuck.done():
            await checks.set_live(live=False)
            service.hang(stuck.result())
            engine.fail_all(UnavailableError(stuck.result()))
            raise TercetError(stuck.result())
        await _drain(settings, service, engine, running)
    finally:
        for task in (running, watching, showing):
            task.cancel()
        await asyncio.gather(running, watching, showing, return_exceptions=True)


async def _show_readiness(service: EngineService, checks: HealthChecks) -> None:
    """Answers health checks rightly also when something other than the end of the process stops new requests."""
    changed = asyncio.Event()
    service.on_change(changed.set)
    while True:
        await changed.wait()
        changed.clear()
        await checks.set_serving(serving=service.takes_requests)


async def _drain(settings: CoreSettings, service: EngineService, engine: Engine, running: asyncio.Task[None]) -> None:
    """Takes nothing new, lets what is in flight finish within the grace, and ends the rest with an error."""
    left = service.drain("the core is being stopped")
    if left:
        _log.info("%d requests may finish within %g s", left, settings.grace)
    idle = asyncio.create_task(engine.wait_idle(), name="wait until idle")
    try:
        ends: set[asyncio.Future[None]] = {idle, running}
        await asyncio.wait(ends, timeout=settings.grace, return_when=asyncio.FIRST_COMPLETED)
    finally:
        idle.cancel()
    engine.fail_all(UnavailableError("The core that ran this request was stopped."))


def _end_process(reporter: Reporter, text: str) -> None:
    """Ends the process from the watchdog's thread: nothing that runs on the event loop can."""
    _log.critical("%s", text)
    faulthandler.dump_traceback(sys.stderr)
    reporter.fatal(text)
    os._exit(1)


def _scheduler_limits(settings: CoreSettings, hello: WorkerHello, limits: CoreWelcome) -> Limits:
    return Limits(
        max_slots=limits.max_slots,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        long_prefill_limit=settings.long_prefill_limit,
        max_partial_prefills=settings.max_partial_prefills,
        prefix_caching=settings.prefix_caching,
        vocab_size=hello.vocab_size,
        stages=hello.stages,
    )
