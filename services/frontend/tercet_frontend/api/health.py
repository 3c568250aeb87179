"""``/livez``, ``/readyz`` and ``/health``: for orchestrators and load balancers; never behind an API key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from tercet_frontend.api.errors import RETRY_AFTER, JsonResponse

if TYPE_CHECKING:
    from tercet_frontend.admission import Admission

HEALTH_PATHS = frozenset({"/livez", "/readyz", "/health"})


def health_router(admission: Admission) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["health"])

    @router.get("/livez", response_class=JsonResponse)
    async def livez() -> Response:
        """Answers 200 as long as the process can answer."""
        return JsonResponse({"status": "ok"})

    @router.get("/readyz", response_class=JsonResponse)
    @router.get("/health", response_class=JsonResponse)
    async def readyz() -> Response:
        """Answers 200 when requests are served, else 503 with the reason."""
        reason = admission.not_ready_reason()
        if reason is None:
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": "not ready", "reason": reason}, 503, {"Retry-After": RETRY_AFTER})

    return router
