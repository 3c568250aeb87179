"""``GET /dashboard/snapshot`` and ``GET /dashboard/events``: what happens now, for the page at ``/dashboard``.

However many look, a snapshot is made and encoded once a second, and only while somebody looks. The routes need a key
where keys are asked for, as they tell of models and load; the page itself holds nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import orjson
from fastapi import APIRouter, Request, Response

from tercet_frontend.access.exchange import exchange_of
from tercet_frontend.admission import ClientGoneError
from tercet_frontend.shortcut import shortcut
from tercet_frontend.sse import EventStream
from tercet_shared.errors import NotFoundError, OverloadedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

    from tercet_frontend.access.keys import ApiKey
    from tercet_frontend.admission import Admission
    from tercet_frontend.telemetry.live import LiveStats

INTERVAL_S: Final = 1.0
"""Seconds between snapshots."""

MAX_VIEWERS: Final = 32
"""Streams of snapshots at once: a bound on what watching can cost those who are served."""


class Dashboard:
    """The snapshots of one front end, and those who look at them. Needs a running event loop.

    Args:
        live: what is shown.
        admission: says whether requests are served, and ends what runs when the process has to.
        frontend_id: name of the front end.
        interval: seconds between snapshots.
        max_viewers: streams at once.
    """

    def __init__(
        self,
        live: LiveStats,
        admission: Admission,
        frontend_id: str,
        *,
        interval: float = INTERVAL_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        self.admission = admission
        self._live = live
        self._frontend_id = frontend_id
        self._interval = interval
        self._max_viewers = max_viewers
        self._loop = asyncio.get_running_loop()
        self._latest = b""
        self._made_at = 0.0
        self._viewers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._change = asyncio.Event()
        self._closed = False

    @property
    def viewers(self) -> int:
        """Streams that are open."""
        return self._viewers

    def latest(self) -> bytes:
        """Returns the snapshot as JSON; it is never older than the interval."""
        now = self._loop.time()
        if not self._latest or now - self._made_at >= self._interval:
            self._made_at = now
            self._latest = orjson.dumps(
                {
                    "frontend": self._frontend_id,
                    "not_ready": self.admission.not_ready_reason(),
                    **asdict(self._live.snapshot()),
                }
            )
        return self._latest

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Keeps a place for one stream.

        Raises:
            OverloadedError: there is none.
            UnavailableError: after `close`.
        """
        if self._closed:
            raise UnavailableError("The server is shutting down.")
        if self._viewers >= self._max_viewers:
            raise OverloadedError(
                f"{self._viewers} dashboards are open, as many as this server shows at once.", retry_after=10.0
            )
        self._viewers += 1
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._tick)
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def show(self, events: EventStream) -> None:
        """Writes the snapshot of now, then each that is made, until `close`; a slow client misses some."""
        while not self._closed:
            change = self._change
            await events.write(b"data: " + self.latest() + b"\n\n")
            await change.wait()
        await events.finish(b"")

    def close(self) -> None:
        """Ends all streams, which would never end by themselves, and lets no more begin."""
        self._closed = True
        self._wake()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._tick)
        self._latest = b""
        self._wake()

    def _wake(self) -> None:
        event, self._change = self._change, asyncio.Event()
        event.set()


class _Events(Response):
    """The stream of one viewer."""

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__()
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send, shortcut(scope))
        try:
            with self._dashboard.viewer():
                await self._dashboard.admission.run(receive, self._dashboard.show(events))
        except ClientGoneError:
            if not events.started:
                raise
        except UnavailableError:
            if not events.started:
                raise
            await events.finish(b"")


def dashboard_router(dashboard: Dashboard) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(include_in_schema=False)

    @router.get("/dashboard/snapshot")
    async def snapshot(request: Request) -> Response:
        """Tells what happens now."""
        _check(exchange_of(request.scope).key)
        return Response(dashboard.latest(), media_type="application/json", headers={"Cache-Control": "no-store"})

    @router.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """Tells it once a second, as server-sent events."""
        _check(exchange_of(request.scope).key)
        return _Events(dashboard)

    return router


def _check(key: ApiKey) -> None:
    if key.models:
        raise NotFoundError("The dashboard tells of all models, and this API key may use some of them only.")
