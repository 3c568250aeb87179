"""One core as the pool holds it: its stream, what the registry says of it, and where the router has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.cores.stream import CoreState, CoreStream
from tercet_frontend.routing import CoreFacts, LoadReport
from tercet_shared.registry.interface import CoreState as RecordState

if TYPE_CHECKING:
    import asyncio

    from tercet_frontend.cores.frames import CoreInfo
    from tercet_frontend.models.interface import ModelNames
    from tercet_frontend.routing import Member, Router
    from tercet_shared.registry.interface import CoreRecord


def name_with_weights(name: str, model_fingerprint: str) -> str:
    """Returns the router's name of exactly this model, for choices that have begun with it.

    While the cores of a name change to other weights, a choice that goes on must not change in its middle.
    """
    return f"{name}\0{model_fingerprint}"


class HeldCore:
    """See the module.

    Attributes:
        stream: to the core.
        record: of the registry; None where it knows nothing but the address.
        names: under which requests may be given to it now.
        departed: runs from the moment at which the registry lost sight of it; None while it is there.
        lingered: it has departed long ago, and is only kept for what runs on it.
    """

    def __init__(self, stream: CoreStream, record: CoreRecord | None) -> None:
        self.stream = stream
        self.record = record
        self.names: tuple[str, ...] = ()
        self.departed: asyncio.TimerHandle | None = None
        self.lingered = False
        self._task: asyncio.Task[None] | None = None
        self._member: Member[CoreStream] | None = None
        self._joined_as: CoreInfo | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begins to keep the stream connected."""
        self._task = tasks.create_task(self.stream.run())

    def stop(self) -> None:
        """Ends that."""
        if self.departed is not None:
            self.departed.cancel()
        if self._task is not None:
            self._task.cancel()

    def depart(self, timer: asyncio.TimerHandle) -> None:
        """The registry has lost sight of it; ``timer`` runs until it counts as gone."""
        self.departed = timer

    def stay(self, record: CoreRecord | None) -> None:
        """The registry shows it."""
        self.record = record
        self.lingered = False
        timer, self.departed = self.departed, None
        if timer is not None:
            timer.cancel()

    @property
    def connected(self) -> bool:
        """Whether the stream works."""
        return self.stream.state in {CoreState.READY, CoreState.DRAINING}

    def not_ready_reason(self, models: ModelNames) -> str:
        """Returns in one sentence why requests are not given to it, where they are not."""
        reason = self.stream.not_ready_reason()
        if reason is not None:
            return reason
        if self._leaves:
            return f"The core at {self.stream.address} takes no new requests: it leaves the fleet."
        info = self.stream.info
        return "" if info is None else models.refusal(info)

    @property
    def _leaves(self) -> bool:
        return self.lingered or (self.record is not None and self.record.state is RecordState.DRAINING)

    def settle(self, models: ModelNames, router: Router[CoreStream]) -> None:
        """Has the router know what the core can be given now."""
        info = self.stream.info
        usable = info is not None and self.stream.state is CoreState.READY and not self._leaves
        names = models.names_of(info) if info is not None and usable else ()
        if self._member is not None and (not names or info != self._joined_as):
            self._member.leave()
            self._member = None
        if info is not None and names:
            known = {*names, *(name_with_weights(name, info.model_fingerprint) for name in names)}
            if self._member is None:
                self._member, self._joined_as = router.join(self.stream, _facts(info), known), info
            elif names != self.names:
                self._member.serve(known)
        self.names = names

    def report(self) -> None:
        """Has the router know how loaded the core says it is."""
        stats = self.stream.stats
        if self._member is not None:
            self._member.report(
                LoadReport(
                    running=stats.running,
                    waiting=stats.waiting,
                    pending_tokens=stats.pending_tokens,
                    token_ms=stats.token_ms,
                )
            )


def _facts(info: CoreInfo) -> CoreFacts:
    return CoreFacts(
        core_id=info.core_id,
        incarnation=info.incarnation,
        model_fingerprint=info.model_fingerprint,
        block_size=info.block_size,
        slots=info.max_slots,
    )
