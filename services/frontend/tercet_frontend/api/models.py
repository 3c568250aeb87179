"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.endpoint import ApiContext, find_model, serving_for
from tercet_frontend.api.errors import JsonResponse

if TYPE_CHECKING:
    from tercet_frontend.cores.interface import ServedModel


def models_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def entry(model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "tercet",
            "max_model_len": model.max_model_len,
        }

    @router.get("/v1/models", response_class=JsonResponse)
    async def list_models(request: Request) -> Response:
        """Lists the models that are served now."""
        cores = serving_for(request, context).cores
        return JsonResponse({"object": "list", "data": [entry(model) for model in cores.models()]})

    @router.get("/v1/models/{model:path}", response_class=JsonResponse)
    async def retrieve_model(model: str, request: Request) -> Response:
        """Describes one model; its name may contain slashes."""
        return JsonResponse(entry(find_model(serving_for(request, context).cores, model)))

    return router
