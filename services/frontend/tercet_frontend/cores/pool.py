"""All cores of a front end: a stream to each that the registry names, and each request on one of them.

The registry says which cores there are; their streams say how they are. So a stream that works is used although the
registry has lost sight of its core, for a while, or for as long as it sees none at all; and a core that the registry
still shows is not used while its stream is down. A core that has left keeps its stream until its last request here is
over.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tercet_frontend.cores.connection import checked_address
from tercet_frontend.cores.held import HeldCore, name_with_weights
from tercet_frontend.cores.interface import ServedModel
from tercet_frontend.cores.migration import MigrationCounters, Migrator
from tercet_frontend.cores.routes import RouteBook
from tercet_frontend.cores.stream import CoreStream
from tercet_shared.errors import ConfigurationError, TercetError, UnavailableError
from tercet_shared.pooling import Pooling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.cores.generation import StreamGeneration
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.cores.journey import Journey, Loss
    from tercet_frontend.cores.options import StreamOptions
    from tercet_frontend.models.interface import ModelNames
    from tercet_frontend.routing import Placement, Router
    from tercet_shared.registry.interface import BlockSink, CoreRecord, Fleet

logger = logging.getLogger(__name__)


class CorePool:
    """`Cores` over a registry. Building it starts nothing; `run` does.

    Args:
        fleet: which cores there are.
        models: which names each of them serves here.
        router: chooses a core for each request; belongs to this pool.
        options: of every stream.
        frontend_id: name of this front end, for the cores' logs and for routes.
        sink: is told what cores have cached, over their streams; None does not ask them.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        models: ModelNames,
        router: Router[CoreStream],
        options: StreamOptions,
        frontend_id: str,
        sink: BlockSink | None = None,
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._router = router
        self._options = options
        self._frontend_id = frontend_id
        self._sink = sink
        self._migrator = Migrator(options, self._place)
        self._routes = RouteBook(fleet, frontend_id)
        self._held: dict[str, HeldCore] = {}  # by address
        self._ready: dict[str, HeldCore] = {}  # those of them that take requests
        self._stalled: set[str] = set()  # ids of the cores that have been without a worker for too long
        self._refused: set[str] = set()  # what the registry calls addresses and is none
        self._served: list[ServedModel] | None = None  # None: to be found out again
        self._tasks: asyncio.TaskGroup | None = None  # while it runs
        self._stopping = asyncio.Event()
        self._change = asyncio.Event()
        self._refresh()
        fleet.watch(self._refresh)
        models.watch(self._models_changed)

    @property
    def streams(self) -> Sequence[CoreStream]:
        """One for each core that there is, in the order in which they came."""
        return [held.stream for held in self._held.values()]

    @property
    def migrations(self) -> MigrationCounters:
        """What became of choices whose core was lost."""
        return self._migrator.counters

    @property
    def migrating(self) -> int:
        """Choices that have no core at this moment."""
        return len(self._migrator)

    async def run(self) -> None:
        """Keeps all streams connected. Returns after `stop`, when they are closed; cancelling does the same.

        Generations that still run then end with `UnavailableError`. Runs once.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            watching = tasks.create_task(self._fleet.run())
            for held in self._held.values():
                held.start(tasks)
            try:
                await self._stopping.wait()
            finally:
                self._tasks = None
                self._migrator.close()
            watching.cancel()
            for held in self._held.values():
                held.stop()

    def stop(self) -> None:
        """Lets `run` end."""
        self._stopping.set()

    async def wait_until_ready(self) -> None:
        """Returns when a request can be served."""
        while self.not_ready_reason() is not None:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Returns when a core came, was connected, lost or refused, began to drain, or changed what it serves."""
        await self._change.wait()

    def not_ready_reason(self) -> str | None:
        """See `Cores`."""
        if self._ready:
            return None
        if not self._held:
            return "No core is known yet."
        others = len(self._held) - 1
        reason = next(iter(self._held.values())).not_ready_reason(self._models)
        return f"{reason}" + (f" ({others} more cores are not ready either.)" if others else "")

    def models(self) -> list[ServedModel]:
        """See `Cores`. Where cores differ in a limit, the smallest counts, so that any of them can serve."""
        if self._served is None:
            limits: dict[str, tuple[int, int]] = {}
            for held in self._ready.values():
                info = held.stream.info
                if info is not None:
                    for name in held.names:
                        length, vocab = limits.get(name, (info.max_model_len, info.vocab_size))
                        limits[name] = min(length, info.max_model_len), min(vocab, info.vocab_size)
            self._served = [ServedModel(name, *limit) for name, limit in limits.items()]
        return self._served

    def submit(self, request: GenerationRequest) -> StreamGeneration:
        """See `Cores`. The choice outlives its core: it goes on where another one takes it."""
        placement = self._router.place(request, request.model, self._stalled)
        if placement is None and self._stalled:  # it waits for the worker where there is nothing else
            placement = self._router.place(request, request.model)
        if placement is None:
            raise UnavailableError(self.not_ready_reason() or f"No core serves {request.model} now.")
        visit = self._routes.visit(request, placement, 0)
        try:
            return placement.core.submit(request, visit)
        except TercetError:
            visit.ended("failed")
            raise

    def _place(self, generation: StreamGeneration, journey: Journey) -> bool:
        """Submits a choice again. See `Migrator`."""
        placement = self._placement(generation, journey)
        if placement is None:
            return False
        visit = self._routes.visit(generation.request, placement, generation.attempt + 1)
        try:
            placement.core.resubmit(generation, visit)
        except TercetError:
            visit.lost(failed=False)
            raise
        return True

    def _placement(self, generation: StreamGeneration, journey: Journey) -> Placement[CoreStream] | None:
        request = generation.request
        model = name_with_weights(request.model, journey.model) if generation.received else request.model
        small = [*self._too_small_for(request), *self._stalled]
        if (held := self._ready.get(journey.avoid)) is not None:  # back already, or it has just refused this choice
            placement = self._router.place(request, model, (held.stream.core_id, *small))
            if placement is not None:
                return placement
        # Who is too small says so, or ends the choice early; who has no worker waits for one. That is only to be had
        # where there is nothing else.
        placement = self._router.place(request, model, small)
        return self._router.place(request, model) if placement is None and small else placement

    def _too_small_for(self, request: GenerationRequest) -> list[str]:
        """Returns the cores in whose context a choice does not fit that was accepted for a larger one."""
        output = request.params.max_tokens if request.pooling is Pooling.NONE else 0
        need = len(request.prompt_ids) + output
        infos = (held.stream.info for held in self._ready.values())
        return [info.core_id for info in infos if info is not None and info.max_model_len < need]

    # ------------------------------------------------------------------------------------------- owner of streams

    def changed(self, stream: CoreStream) -> None:
        """See `StreamOwner`."""
        held = self._holder(stream)
        if held is None:
            return
        if not held.connected:
            self._stalled.discard(stream.core_id)
        if held.departed is not None and not held.connected:
            self._release(held)
        else:
            self._settle(held)
        self._notify()

    def reported(self, stream: CoreStream) -> None:
        """See `StreamOwner`."""
        held = self._holder(stream)
        if held is not None:
            held.report()
            self._look_for_worker(held)

    def _look_for_worker(self, held: HeldCore) -> None:
        """Moves the choices of a core that has been without a worker for too long, if another core can have them."""
        stream = held.stream
        seconds = stream.stats.without_worker_s
        if seconds < self._options.stall_timeout:
            self._stalled.discard(stream.core_id)
            return
        self._stalled.add(stream.core_id)
        if stream.active and self._another_has_the_model(stream):
            reason = f"The core at {stream.address} has been without a worker for {seconds:.1f} s."
            logger.warning("%s Its %d requests here are moved.", reason, stream.active)
            stream.hand_over(reason)

    def _another_has_the_model(self, stream: CoreStream) -> bool:
        infos = (held.stream.info for held in self._ready.values() if held.stream is not stream)
        own = "" if stream.info is None else stream.info.model_fingerprint
        return any(
            info is not None and info.model_fingerprint == own and info.core_id not in self._stalled for info in infos
        )

    def lost(self, generation: StreamGeneration, stream: CoreStream, loss: Loss, reason: str) -> None:
        """See `StreamOwner`."""
        model = stream.info.model_fingerprint if stream.info is not None else ""
        self._migrator.lost(generation, loss, address=stream.address, model=model, reason=reason)

    def idle(self, stream: CoreStream) -> None:
        """See `StreamOwner`."""
        held = self._holder(stream)
        if held is not None and held.lingered:
            self._release(held)
            self._notify()

    # ------------------------------------------------------------------------------------------------- the fleet

    def _refresh(self) -> None:
        """Brings the streams in line with the registry."""
        cores = self._fleet.cores()
        for address, record in cores.items():
            held = self._held.get(address)
            if held is not None:
                held.stay(record)
                self._settle(held)
            elif address not in self._refused:
                self._meet(address, record)
        for address in [address for address in self._held if address not in cores]:
            self._part(self._held[address])
        self._notify()

    def _meet(self, address: str, record: CoreRecord | None) -> None:
        try:
            checked_address(address)
        except ConfigurationError as error:
            self._refused.add(address)
            logger.warning("the registry has a core that cannot be reached: %s", error.message)
            return
        stream = CoreStream(address, frontend_id=self._frontend_id, options=self._options, owner=self, sink=self._sink)
        held = self._held[address] = HeldCore(stream, record)
        if self._tasks is not None:
            held.start(self._tasks)

    def _part(self, held: HeldCore) -> None:
        if not held.connected:
            self._release(held)
        elif held.departed is None:
            logger.info("The core at %s has left the registry; its stream works.", held.stream.address)
            loop = asyncio.get_running_loop()
            held.depart(loop.call_later(self._options.linger, self._linger_over, held))

    def _linger_over(self, held: HeldCore) -> None:
        if not self._fleet.cores():  # all at once: that says more of the registry than of cores whose streams work
            held.depart(asyncio.get_running_loop().call_later(self._options.linger, self._linger_over, held))
            return
        held.lingered = True
        self._settle(held)
        if not held.stream.active:
            self._release(held)
        self._notify()

    def _release(self, held: HeldCore) -> None:
        held.stay(None)  # no timer is left
        self._stalled.discard(held.stream.core_id)
        held.lingered = True
        self._settle(held)
        del self._held[held.stream.address]
        held.stop()

    def _holder(self, stream: CoreStream) -> HeldCore | None:
        held = self._held.get(stream.address)
        return held if held is not None and held.stream is stream else None

    def _settle(self, held: HeldCore) -> None:
        held.settle(self._models, self._router)
        if held.names:
            self._ready[held.stream.address] = held
        else:
            self._ready.pop(held.stream.address, None)

    def _models_changed(self) -> None:
        for held in self._held.values():
            self._settle(held)
        self._notify()

    def _notify(self) -> None:
        self._served = None
        event, self._change = self._change, asyncio.Event()
        event.set()
        if self._ready:
            self._migrator.cores_changed()
