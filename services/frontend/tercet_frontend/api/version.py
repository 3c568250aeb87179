"""``GET /version``."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tercet_frontend.api.errors import JsonResponse


def version_router(version: str) -> APIRouter:
    """Returns the route."""
    router = APIRouter(tags=["version"])

    @router.get("/version", response_class=JsonResponse)
    async def show_version() -> Response:
        """Says which Tercet this is."""
        return JsonResponse({"version": version})

    return router
