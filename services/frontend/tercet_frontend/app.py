"""The FastAPI application, put together from what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from tercet_frontend.api.chat import chat_router
from tercet_frontend.api.completions import completions_router
from tercet_frontend.api.endpoint import ApiContext
from tercet_frontend.api.errors import install_error_handlers
from tercet_frontend.api.health import health_router
from tercet_frontend.api.models import models_router
from tercet_frontend.api.openapi import describe_bodies
from tercet_frontend.edge import Edge
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.completion import CompletionRequest

if TYPE_CHECKING:
    from tercet_frontend.admission import Admission
    from tercet_frontend.auth import ApiKeys
    from tercet_frontend.tokenizing import PromptEncoder


def create_app(*, admission: Admission, encoder: PromptEncoder, keys: ApiKeys, max_body_bytes: int) -> FastAPI:
    """Returns the application. It starts nothing, and owns nothing of what it is given.

    Args:
        admission: who is let in, and what requests work with.
        encoder: makes prompt ids.
        keys: API keys that are accepted.
        max_body_bytes: largest request body that is read.
    """
    app = FastAPI(title="Tercet", version="0.1.0", redoc_url=None, redirect_slashes=False)
    context = ApiContext(admission=admission, encoder=encoder, max_body_bytes=max_body_bytes)
    app.include_router(chat_router(context))
    app.include_router(completions_router(context))
    app.include_router(models_router(context))
    app.include_router(health_router(admission))
    install_error_handlers(app)
    describe_bodies(app, [ChatRequest, CompletionRequest])
    app.add_middleware(Edge, keys=keys)
    return app
