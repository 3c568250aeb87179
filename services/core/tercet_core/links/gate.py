"""Who may be this core's worker: the first sets what the core serves, each later one must be able to take over.

A worker may be a group of processes, its ranks. Each joins by itself; the group is the worker once all of them are
here. Meanwhile the core takes nobody else, unless the group gets no further.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeAlias

from tercet_core.links.gathering import Gathering
from tercet_core.links.worker_link import WorkerLink
from tercet_shared.errors import LinkError
from tercet_shared.ipc.group import Place
from tercet_shared.ipc.listener import Accepted, Rejected, Verdict
from tercet_shared.wire.frames import decode_hello, encode_welcome
from tercet_shared.wire.step import PROTOCOL_VERSION, CoreWelcome, WorkerHello

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tercet_core.links.group import GroupLink
    from tercet_shared.config import CoreSettings
    from tercet_shared.ipc.link import FrameLink

_log = logging.getLogger(__name__)

AnyLink: TypeAlias = "WorkerLink | GroupLink"
"""One worker, of one process or several."""

_SAME: Final = {
    "model_fingerprint": "another model",
    "tokenizer_fingerprint": "another tokenizer",
    "vocab_size": "another vocabulary",
    "block_size": "another block size",
    "dtype": "another dtype",
    "stages": "another number of pipeline stages",
}
"""Fields of a hello that may not change, because requests go on where another worker left them."""

_PROMISED: Final = ("max_slots", "max_model_len", "max_batched_tokens")

_OCCUPIED: Final = "this core has a worker already"

_STALE_S: Final = 5.0
"""Seconds after its last rank came in which a group that is not whole keeps others out. All of its ranks have found
each other before the first comes, so those that come do so nearly at once; what is left of a dead group must not be in
the way of its successor."""


class WorkerGate:
    """Lets one worker in at a time, under limits that both sides can keep. Used on one event loop."""

    def __init__(self, core_id: str, settings: CoreSettings) -> None:
        self._core_id = core_id
        self._settings = settings
        self._link: AnyLink | None = None
        self._gathering: Gathering | None = None
        self._arrived = asyncio.Event()
        self._limits: CoreWelcome | None = None  # as agreed with the first worker
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = ""  # why nobody is let in any more

    @property
    def limits(self) -> CoreWelcome:
        """What was agreed with the first worker and holds from then on."""
        if self._limits is None:
            raise RuntimeError("no worker has joined yet")
        return self._limits

    async def worker(self) -> AnyLink:
        """Waits until a worker has joined, with all of its ranks, that was not returned before.

        Raises:
            LinkError: none has within the time that the settings allow; of a group, the sentence says who is missing.
        """
        try:
            async with asyncio.timeout(self._settings.worker_timeout):
                await self._arrived.wait()
        except TimeoutError:
            within = f"within {self._settings.worker_timeout:g} s"
            if self._gathering is not None:
                raise LinkError(
                    f"The worker group is not whole {within}: {self._gathering.lack()} did not connect."
                ) from None
            raise LinkError(f"No worker has connected to {self._settings.link} {within}.") from None
        self._arrived.clear()
        if self._link is None:
            raise AssertionError("a worker arrived and is not there")
        return self._link

    def judge(self, frame: bytes) -> Verdict:
        """Answers the hello of a worker, or of a rank of one."""
        if self._closed or self._occupied():
            return Rejected(self._closed or _OCCUPIED)
        hello = decode_hello(frame)
        reason = self._refusal(hello)
        if reason is not None:
            return Rejected(reason)
        place = Place(hello.group, hello.rank, hello.ranks) if hello.ranks > 1 else None
        return Accepted(encode_welcome(self._limits or self._negotiate(hello)), place)

    def admit(self, connection: FrameLink, frame: bytes) -> None:
        """Takes over a worker, or a rank of one, whose hello was accepted."""
        hello = decode_hello(frame)
        # Others that were judged before may have been quicker.
        reason = self._closed or (_OCCUPIED if self._occupied() else self._refusal(hello))
        if reason:
            self._spawn(connection.close(reason))
        elif hello.ranks == 1:
            self._make_way(hello)
            self._serve(WorkerLink(connection, hello))
        else:
            self._gather(connection, hello)

    async def close(self, goodbye: str) -> None:
        """Ends the link to the worker, if there is one, and those to ranks that wait for others. Lets nobody in."""
        self._closed = goodbye
        if self._link is not None:
            await self._link.close(goodbye)
        if self._gathering is not None:
            self._gathering.dissolve(goodbye)
        if self._closing:
            await asyncio.gather(*self._closing)

    def _gather(self, connection: FrameLink, hello: WorkerHello) -> None:
        self._make_way(hello)
        if self._gathering is None:
            self._gathering = Gathering(hello, self._spawn, self._on_dissolved)
        gathering = self._gathering
        _log.info("rank %d of %d of worker group %s joined", hello.rank, hello.ranks, hello.group)
        group = gathering.add(connection, hello)
        if group is not None:
            self._gathering = None
            self._serve(group)

    def _make_way(self, hello: WorkerHello) -> None:
        """Sends away what has come of another group; it was here for so long that it was not to be waited for."""
        if self._gathering is not None and self._gathering.group != hello.group:
            self._gathering.dissolve(f"{self._gathering.lack()} did not come, and another worker did")

    def _on_dissolved(self, gathering: Gathering, reason: str) -> None:
        _log.warning("worker group %s is sent away: %s", gathering.group, reason)
        if self._gathering is gathering:
            self._gathering = None

    def _serve(self, link: AnyLink) -> None:
        self._link = link
        if self._limits is None:
            self._limits = self._negotiate(link.hello)
        _log.info("worker %d joined, incarnation %s", link.hello.pid, link.hello.incarnation)
        self._arrived.set()

    def _refusal(self, hello: WorkerHello) -> str | None:
        """Returns why a worker cannot join while there is none, or None."""
        gathering = self._gathering
        if gathering is not None and gathering.group == hello.group:
            return gathering.refusal(hello)
        if gathering is not None and gathering.waits_s < _STALE_S:
            return f"this core waits for {gathering.lack()} of another worker"
        if self._link is not None and self._limits is not None:
            return _unfit(hello, self._link.hello, self._limits)
        return None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _occupied(self) -> bool:
        return self._link is not None and self._link.close_reason is None

    def _negotiate(self, hello: WorkerHello) -> CoreWelcome:
        settings = self._settings
        return CoreWelcome(
            protocol=PROTOCOL_VERSION,
            core_id=self._core_id,
            max_slots=min(settings.max_num_seqs, hello.max_slots),
            max_model_len=min(settings.max_model_len or hello.max_model_len, hello.max_model_len),
            max_batched_tokens=min(
                settings.max_num_batched_tokens or hello.max_batched_tokens, hello.max_batched_tokens
            ),
            # Every stage has a step, and one more is on its way.
            pipeline_depth=max(settings.pipeline_depth, hello.stages + 1 if hello.stages > 1 else 1),
        )


def _unfit(hello: WorkerHello, served: WorkerHello, limits: CoreWelcome) -> str | None:
    """Returns why a worker cannot take over from one that offered ``served``, or None."""
    for name, what in _SAME.items():
        if getattr(hello, name) != getattr(served, name):
            return f"the worker has {what} than the one before it; this core's requests cannot go on there"
    for name in _PROMISED:
        offered, promised = getattr(hello, name), getattr(limits, name)
        if offered < promised:
            return f"the worker offers a {name} of {offered}, but this core has promised {promised}"
    return None
