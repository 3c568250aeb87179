"""Who may be this core's worker: the first sets what the core serves, each later one must be able to take over."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from tercet_core.links.worker_link import WorkerLink
from tercet_shared.errors import LinkError
from tercet_shared.ipc.listener import Accepted, Rejected, Verdict
from tercet_shared.wire.frames import decode_hello, encode_welcome
from tercet_shared.wire.step import PROTOCOL_VERSION, CoreWelcome, WorkerHello

if TYPE_CHECKING:
    from tercet_shared.config import CoreSettings
    from tercet_shared.ipc.connection import LinkConnection

_log = logging.getLogger(__name__)

_SAME: Final = {
    "model_fingerprint": "another model",
    "tokenizer_fingerprint": "another tokenizer",
    "vocab_size": "another vocabulary",
    "block_size": "another block size",
    "dtype": "another dtype",
}
"""Fields of a hello that may not change, because requests go on where another worker left them."""

_PROMISED: Final = ("max_slots", "max_model_len", "max_batched_tokens")


class WorkerGate:
    """Lets one worker in at a time, under limits that both sides can keep. Used on one event loop."""

    def __init__(self, core_id: str, settings: CoreSettings) -> None:
        self._core_id = core_id
        self._settings = settings
        self._link: WorkerLink | None = None
        self._arrived = asyncio.Event()
        self._limits: CoreWelcome | None = None  # as agreed with the first worker
        self._surplus: set[asyncio.Task[None]] = set()

    @property
    def limits(self) -> CoreWelcome:
        """What was agreed with the first worker and holds from then on."""
        if self._limits is None:
            raise RuntimeError("no worker has joined yet")
        return self._limits

    async def worker(self) -> WorkerLink:
        """Waits until a worker has joined that was not returned before.

        Raises:
            LinkError: none has within the time that the settings allow.
        """
        try:
            async with asyncio.timeout(self._settings.worker_timeout):
                await self._arrived.wait()
        except TimeoutError:
            raise LinkError(
                f"No worker has connected to {self._settings.link} within {self._settings.worker_timeout:g} s."
            ) from None
        self._arrived.clear()
        if self._link is None:
            raise AssertionError("a worker arrived and is not there")
        return self._link

    def judge(self, frame: bytes) -> Verdict:
        """Answers a worker's hello."""
        if self._occupied():
            return Rejected("this core has a worker already")
        hello = decode_hello(frame)
        if self._link is not None and self._limits is not None:
            reason = _unfit(hello, self._link.hello, self._limits)
            return Accepted(encode_welcome(self._limits)) if reason is None else Rejected(reason)
        return Accepted(encode_welcome(self._negotiate(hello)))

    def admit(self, connection: LinkConnection, frame: bytes) -> None:
        """Takes over a worker whose hello was accepted."""
        link = WorkerLink(connection, decode_hello(frame))
        if self._occupied():  # two were judged before the first of them was here
            task = asyncio.get_running_loop().create_task(link.close("this core has a worker already"))
            self._surplus.add(task)
            task.add_done_callback(self._surplus.discard)
            return
        self._link = link
        if self._limits is None:
            self._limits = self._negotiate(link.hello)
        _log.info("worker %d joined, incarnation %s", link.hello.pid, link.hello.incarnation)
        self._arrived.set()

    async def close(self, goodbye: str) -> None:
        """Ends the link to the worker, if there is one."""
        if self._link is not None:
            await self._link.close(goodbye)
        if self._surplus:
            await asyncio.gather(*self._surplus)

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
            pipeline_depth=settings.pipeline_depth,
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
