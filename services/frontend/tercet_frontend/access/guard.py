"""From settings to all that guards a front end: keys, quotas, places, limits of connections, TLS, logs."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tercet_frontend.access.connection import ConnectionLimits
from tercet_frontend.access.journal import Journal
from tercet_frontend.access.key_file import KeyFile
from tercet_frontend.access.notes import Notes
from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.access.proxies import TrustedProxies
from tercet_frontend.access.quotas import LocalQuotas
from tercet_frontend.access.redis_keys import RedisKeys
from tercet_frontend.access.redis_link import RedisLink
from tercet_frontend.access.redis_quotas import RedisQuotas
from tercet_frontend.access.tls import ServerTls
from tercet_frontend.auth import ApiKeys
from tercet_frontend.edge import EdgeOptions
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tercet_frontend.access.quotas import Quotas
    from tercet_shared.config import FrontendSettings

_SPARE_FILES = 512
"""Descriptors besides those of connections."""


class Guard:
    """What stands between clients and the application. Needs a running event loop.

    Attributes:
        notes: the logs.
        keys: who may call.
        quotas: what keys may use.
        occupancy: how many requests there may be.
        edge: how requests are taken in.
        limits: of connections.
        tls: None for plain HTTP.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        """Reads and opens all files that ``settings`` name; `close` closes them.

        Raises:
            ConfigurationError: one of them, or a setting, cannot work.
        """
        _check_origins(settings.cors_origin)
        proxies = TrustedProxies(settings.trusted_proxy)
        self.occupancy = Occupancy(max_requests=settings.max_requests, max_waiting=settings.max_waiting)
        self.limits = ConnectionLimits(
            max_connections=settings.max_connections,
            receive_timeout=settings.receive_timeout,
            client_timeout=settings.client_timeout,
        )
        self.quotas: Quotas = LocalQuotas()
        self._remote: RedisKeys | None = None
        if settings.redis_url is not None:
            link = RedisLink(settings.redis_url)
            self.quotas = RedisQuotas(link)
            self._remote = RedisKeys(link) if settings.api_keys_redis else None
        elif settings.api_keys_redis:
            raise ConfigurationError("API keys in Redis need --redis-url.", param="api_keys_redis")
        self.notes = _notes(settings)
        try:
            self.tls = _tls(settings, self.notes)
            self._file = (
                None
                if settings.api_keys_file is None
                else KeyFile(settings.api_keys_file, reloaded=lambda outcome: self.notes.event("keys", outcome))
            )
            self.keys = ApiKeys(settings.api_key, file=self._file, remote=self._remote)
        except BaseException:
            self.notes.close()
            raise
        self.edge = EdgeOptions(
            proxies=proxies,
            notes=self.notes,
            heartbeat=settings.sse_heartbeat,
            origins=settings.cors_origin,
            client_certificates=self.tls is not None and self.tls.asks_clients,
        )
        self._hangup_matters = self.tls is not None or self._file is not None or self.notes.wanted
        _allow_files(settings.max_connections + _SPARE_FILES)

    def reload(self) -> None:
        """Reads keys and certificates again, and opens the logs anew."""
        if self._file is not None:
            self._file.reload()
        if self._remote is not None:
            self._remote.forget()
        if self.tls is not None:
            self.tls.reload()
        self.notes.reopen()

    @contextlib.asynccontextmanager
    async def reloading(self) -> AsyncIterator[None]:
        """Reloads on SIGHUP, if there is anything to reload; otherwise the signal ends the process as ever."""
        if not self._hangup_matters:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def close(self) -> None:
        """Settles quotas, writes what is left of the logs, lets go of everything."""
        await self.quotas.close()
        # The thread that writes may take a while; it is not waited for on the loop.
        await asyncio.to_thread(self.notes.close)


def _notes(settings: FrontendSettings) -> Notes:
    target = settings.access_log
    try:
        access = None if target == "off" else Journal(None if target == "stderr" else Path(target))
    except ConfigurationError as error:
        raise ConfigurationError(error.message, param="access_log") from None
    try:
        audit = None if settings.audit_log is None else Journal(settings.audit_log)
    except ConfigurationError as error:
        if access is not None:
            access.close()
        raise ConfigurationError(error.message, param="audit_log") from None
    return Notes(access, audit)


def _tls(settings: FrontendSettings, notes: Notes) -> ServerTls | None:
    if settings.tls_cert is None and settings.tls_key is None:
        if settings.tls_client_ca is not None:
            raise ConfigurationError("--tls-client-ca needs --tls-cert and --tls-key.", param="tls_client_ca")
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigurationError("--tls-cert and --tls-key belong together.", param="tls_cert")
    return ServerTls(
        settings.tls_cert,
        settings.tls_key,
        settings.tls_client_ca,
        reloaded=lambda outcome: notes.event("certificate", outcome),
    )


def _check_origins(origins: list[str]) -> None:
    for origin in origins:
        scheme, separator, rest = origin.partition("://")
        if origin != "*" and (scheme not in {"http", "https"} or not separator or not rest or "/" in rest):
            raise ConfigurationError(
                f"{origin!r} is no origin, as https://host or http://host:port, or *.", param="cors_origin"
            )


def _allow_files(wanted: int) -> None:
    """Raises the limit of open files as far as it may be, up to ``wanted``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
