"""The core's life: listen, wait for the worker, run the engine, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

from tercet_core.engine import Engine
from tercet_core.links.worker_link import WorkerLink
from tercet_core.scheduling.scheduler import Scheduler
from tercet_core.scheduling.state import Limits
from tercet_core.service import EngineService, HealthChecks, make_server
from tercet_shared.errors import LinkError, UnavailableError
from tercet_shared.ipc.listener import Accepted, LinkListener, Rejected, Verdict
from tercet_shared.ipc.settings import HeartbeatSettings, ListenerSettings
from tercet_shared.wire.step import PROTOCOL_VERSION, CoreWelcome, WorkerHello, decode_hello, encode_welcome

if TYPE_CHECKING:
    from tercet_shared.config import CoreSettings
    from tercet_shared.ipc.connection import LinkConnection
    from tercet_shared.lifecycle.report import Reporter

_log = logging.getLogger(__name__)


class WorkerGate:
    """Lets one worker in, under limits that both sides can keep."""

    def __init__(self, core_id: str, settings: CoreSettings) -> None:
        self._core_id = core_id
        self._settings = settings
        self.joined: asyncio.Future[tuple[WorkerLink, CoreWelcome]] = asyncio.get_running_loop().create_future()

    def judge(self, frame: bytes) -> Verdict:
        """Answers a worker's hello."""
        if self.joined.done():
            return Rejected("this core has a worker already")
        return Accepted(encode_welcome(self._limits(decode_hello(frame))))

    def admit(self, connection: LinkConnection, frame: bytes) -> None:
        """Takes over a worker whose hello was accepted."""
        hello = decode_hello(frame)
        self.joined.set_result((WorkerLink(connection, hello), self._limits(hello)))

    def _limits(self, hello: WorkerHello) -> CoreWelcome:
        settings = self._settings
        return CoreWelcome(
            protocol=PROTOCOL_VERSION,
            core_id=self._core_id,
            max_slots=min(settings.max_num_seqs, hello.max_slots),
            max_model_len=min(settings.max_model_len or hello.max_model_len, hello.max_model_len),
            max_batched_tokens=min(
                settings.max_num_batched_tokens or hello.max_batched_tokens, hello.max_batched_tokens
            ),
            pipeline_depth=settings.pipeline_depth,
        )


async def serve(settings: CoreSettings, reporter: Reporter, stop: asyncio.Event) -> None:
    """Runs the core until ``stop`` is set.

    Raises:
        ConfigurationError: an address cannot be used.
        LinkError: the worker never came, is gone, or broke the protocol.
    """
    core_id = settings.core_id or f"core-{secrets.token_hex(4)}"
    service = EngineService(core_id, settings)
    server, checks = make_server(service, settings)
    gate = WorkerGate(core_id, settings)
    heartbeat = HeartbeatSettings(settings.heartbeat_interval, settings.heartbeat_timeout)
    with LinkListener(settings.link, ListenerSettings(heartbeat=heartbeat)) as listener:
        await checks.set_serving(serving=False)
        await server.start()
        accepting = asyncio.create_task(listener.serve(gate.judge, gate.admit), name="accept workers")
        life = asyncio.create_task(_live(settings, reporter, service, checks, gate, stop), name="core")
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
            service.close_streams()
            await server.stop(grace=1.0)
            if gate.joined.done() and not gate.joined.cancelled():
                link, _ = gate.joined.result()
                await link.close("the core stops")


async def _live(
    settings: CoreSettings,
    reporter: Reporter,
    service: EngineService,
    checks: HealthChecks,
    gate: WorkerGate,
    stop: asyncio.Event,
) -> None:
    stopping = asyncio.create_task(stop.wait(), name="wait for the stop")
    try:
        events: set[asyncio.Future[Any]] = {gate.joined, stopping}
        await asyncio.wait(events, timeout=settings.worker_timeout, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        if not gate.joined.done():
            raise LinkError(f"No worker has connected to {settings.link} within {settings.worker_timeout:g} s.")
        link, limits = gate.joined.result()
        engine = Engine(
            Scheduler(_scheduler_limits(settings, link.hello, limits), policy=settings.policy),
            link,
            service.publish,
            depth=settings.pipeline_depth,
        )
        service.attach(engine, link.hello, limits)
        running = asyncio.create_task(engine.run(), name="engine")
        try:
            await checks.set_serving(serving=True)
            reporter.ready(core=limits.core_id)
            turns: set[asyncio.Future[Any]] = {running, stopping}
            await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await checks.set_serving(serving=False)
            await _drain(settings, service, engine, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        stopping.cancel()


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


def _scheduler_limits(settings: CoreSettings, hello: WorkerHello, limits: CoreWelcome) -> Limits:
    return Limits(
        max_slots=limits.max_slots,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        long_prefill_limit=settings.long_prefill_limit,
        prefix_caching=settings.prefix_caching,
        vocab_size=hello.vocab_size,
    )
