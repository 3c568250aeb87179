"""``DELETE /v1/requests/{id}``: ends a request that runs.

Of use where closing the connection is not: behind a proxy that keeps it open, or from another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.edge import tenant_of
from tercet_shared.errors import NotFoundError, bounded

if TYPE_CHECKING:
    from tercet_frontend.api.endpoint import ApiContext
    from tercet_frontend.others import Others


MAX_ID = 128
"""Characters of an id: no request has a longer one."""


def cancel_router(context: ApiContext, others: Others) -> APIRouter:
    """Returns the route; requests that do not run here are looked for in ``others``."""
    router = APIRouter(tags=["requests"])

    @router.delete("/v1/requests/{request_id:path}", response_class=JsonResponse)
    async def cancel_request(request_id: str, request: Request) -> Response:
        """Ends a running request by the id of its answer, or by the X-Request-Id that its client sent."""
        tenant = tenant_of(request.scope)
        number = context.admission.running.cancel(tenant, request_id) if len(request_id) <= MAX_ID else 0
        if not number and len(request_id) <= MAX_ID:
            number = await others.cancel(tenant, request_id)
        if not number:
            raise NotFoundError(f"No request with the id {bounded(request_id, 128)!r} is running.")
        return JsonResponse({"id": request_id, "object": "request", "cancelled": True})

    return router
