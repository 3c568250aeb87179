"""A core's place in its fleet: what it says of itself in the registry, from its first worker to its end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from tercet_shared.errors import ConfigurationError
from tercet_shared.mtls import is_local
from tercet_shared.registry.client import close_client, redis_client
from tercet_shared.registry.interface import CoreLoad, CoreRecord, CoreState
from tercet_shared.registry.member import RedisMember

if TYPE_CHECKING:
    from tercet_core.service import EngineService
    from tercet_shared.config import CoreSettings
    from tercet_shared.registry.blocks import BlockLog

_log = logging.getLogger(__name__)

_TIMEOUT: Final = 2.0
"""Seconds for a connection to Redis, and for an answer."""

_EVERYWHERE: Final = {"", "0.0.0.0", "::", "[::]", "*"}  # noqa: S104  # compared, not bound


def advertised(settings: CoreSettings) -> str:
    """Returns the address under which front ends reach the core.

    Raises:
        ConfigurationError: none is given, and that to listen on stands for several.
    """
    address = settings.advertise or settings.listen
    host, colon, port = address.rpartition(":")
    if is_local(address):
        if len(address) > len("unix:"):
            return address
    elif host not in _EVERYWHERE and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535:
        return address
    elif settings.advertise is None:
        raise ConfigurationError(
            f"With --redis-url the address that is registered must be given with --advertise: {address} is none that "
            "a front end could connect to.",
            param="advertise",
        )
    raise ConfigurationError(
        f"--advertise must be host:port or unix:/path, as front ends reach it, not {address}.", param="advertise"
    )


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.error("the core is not registered any more", exc_info=fault)


class Membership:
    """Registers the core from `join` until `leave`. Redis may be away all the time.

    Args:
        url: of Redis.
        settings: of the core.
        service: what is registered.

    Raises:
        ConfigurationError: an address is none.
    """

    def __init__(self, url: str, settings: CoreSettings, service: EngineService) -> None:
        self._address = advertised(settings)
        self._settings = settings
        self._service = service
        self._client = redis_client(url, timeout=_TIMEOUT)
        self._member: RedisMember | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """Whether the registry has what the core says; not before the core has its worker."""
        return self._member is not None and self._member.healthy

    @property
    def failures(self) -> int:
        """How often the registry could not be reached, or refused."""
        return 0 if self._member is None else self._member.failures

    def record(self) -> CoreRecord:
        """Returns what the core says of itself now; it must have its worker."""
        welcome, stats = self._service.introduction, self._service.stats()
        return CoreRecord(
            core_id=welcome.core_id,
            address=self._address,
            incarnation=welcome.incarnation,
            served_names=tuple(welcome.served_names) or (welcome.model_name,),
            source=self._settings.model or "",
            revision=self._settings.revision or "",
            model_fingerprint=welcome.model_fingerprint,
            tokenizer_fingerprint=welcome.tokenizer_fingerprint,
            block_size=welcome.block_size,
            state=CoreState.READY if self._service.takes_requests else CoreState.DRAINING,
            load=CoreLoad(
                running=stats.running,
                waiting=stats.waiting,
                pending_tokens=stats.pending_tokens,
                free_blocks=stats.free_blocks,
            ),
        )

    def join(self, blocks: BlockLog) -> None:
        """Begins to register the core, which has its worker by now; ``blocks``: its block events."""
        if self._settings.model is None:
            _log.warning("without --model only front ends that are given the model use this core")
        self._member = RedisMember(
            self._client,
            self._settings.redis_prefix,
            self,
            blocks,
            interval=self._settings.heartbeat_interval,
            ttl=self._settings.heartbeat_timeout,
        )
        self._running = asyncio.create_task(self._member.run(), name="registry")
        self._running.add_done_callback(_log_fault)
        self._service.on_change(self._member.changed)

    async def leave(self) -> None:
        """Takes the core out of the registry, if it can be reached, and closes the connections."""
        try:
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
            if self._member is not None:
                await self._member.leave()
        finally:
            await close_client(self._client)
