"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from tercet_frontend.access.exchange import exchange_of
from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.api.scope import visible
from tercet_shared.errors import ModelNotFoundError, bounded

if TYPE_CHECKING:
    from tercet_frontend.api.endpoint import ApiContext
    from tercet_frontend.models.served import ListedModel


def models_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def entry(listed: ListedModel) -> dict[str, Any]:
        return {
            "id": listed.model.name,
            "object": "model",
            "created": created,
            "owned_by": "tercet",
            "root": listed.root,
            "parent": listed.parent,
            "max_model_len": listed.model.max_model_len,
        }

    def entries(request: Request) -> list[ListedModel]:
        return visible(context.admission.admit(), exchange_of(request.scope).key)

    @router.get("/v1/models", response_class=JsonResponse)
    async def list_models(request: Request) -> Response:
        """Lists the models that are served now."""
        return JsonResponse({"object": "list", "data": [entry(listed) for listed in entries(request)]})

    @router.get("/v1/models/{model:path}", response_class=JsonResponse)
    async def retrieve_model(model: str, request: Request) -> Response:
        """Describes one model; its name may contain slashes."""
        for listed in entries(request):
            if listed.model.name == model:
                return JsonResponse(entry(listed))
        raise ModelNotFoundError(f"There is no model {bounded(model, 100)!r} here.", param="model")

    return router
