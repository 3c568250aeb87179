"""The FastAPI application, put together from what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from tercet_frontend.access.quotas import LocalQuotas
from tercet_frontend.api.cancel import cancel_router
from tercet_frontend.api.chat import chat_router
from tercet_frontend.api.completions import completions_router
from tercet_frontend.api.dashboard import dashboard_router
from tercet_frontend.api.embeddings import embeddings_router
from tercet_frontend.api.endpoint import ApiContext
from tercet_frontend.api.errors import install_error_handlers
from tercet_frontend.api.health import health_router
from tercet_frontend.api.messages import messages_router
from tercet_frontend.api.models import models_router
from tercet_frontend.api.openapi import describe_bodies
from tercet_frontend.api.pages import Pages
from tercet_frontend.api.responses import responses_router
from tercet_frontend.api.tokenize import tokenize_router
from tercet_frontend.api.version import version_router
from tercet_frontend.conversations import MemoryResponses
from tercet_frontend.edge import Edge, EdgeOptions, Gate, cross_origin
from tercet_frontend.others import NoOthers
from tercet_frontend.schemas.anthropic import CountTokensRequest, MessagesRequest
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.completion import CompletionRequest
from tercet_frontend.schemas.embeddings import EmbeddingRequest
from tercet_frontend.schemas.responses import ResponsesRequest
from tercet_frontend.schemas.tokenize import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from tercet_frontend.access.quotas import Quotas
    from tercet_frontend.admission import Admission
    from tercet_frontend.api.dashboard import Dashboard
    from tercet_frontend.auth import ApiKeys
    from tercet_frontend.conversations import ResponseStore
    from tercet_frontend.others import Others
    from tercet_frontend.tokenizing import PromptEncoder


_BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def create_app(
    *,
    admission: Admission,
    encoder: PromptEncoder,
    keys: ApiKeys,
    max_body_bytes: int,
    chat_page: bool = True,
    store: ResponseStore | None = None,
    quotas: Quotas | None = None,
    edge: EdgeOptions | None = None,
    receive_timeout: float | None = None,
    others: Others | None = None,
    dashboard: Dashboard | None = None,
) -> FastAPI:
    """Returns the application. It starts nothing, and owns nothing of what it is given.

    Args:
        admission: who is let in, and what requests work with.
        encoder: makes prompt ids.
        keys: API keys that are accepted.
        max_body_bytes: largest request body that is read.
        chat_page: whether to serve the chat page.
        store: keeps responses; by default this process does.
        quotas: counts what keys use; by default this process does.
        edge: how requests are taken in.
        receive_timeout: seconds in which a body has to come; None sets no limit.
        others: the other front ends; None for none.
        dashboard: what its page shows; None serves neither.
    """
    app = FastAPI(title="Tercet", version="0.1.0", redoc_url=None, redirect_slashes=False)
    options = EdgeOptions() if edge is None else edge
    context = ApiContext(
        admission=admission,
        encoder=encoder,
        max_body_bytes=max_body_bytes,
        receive_timeout=receive_timeout,
        quotas=LocalQuotas() if quotas is None else quotas,
    )
    app.include_router(chat_router(context))
    app.include_router(completions_router(context))
    app.include_router(responses_router(context, MemoryResponses() if store is None else store))
    app.include_router(messages_router(context))
    app.include_router(embeddings_router(context))
    app.include_router(tokenize_router(context))
    app.include_router(models_router(context))
    app.include_router(cancel_router(context, NoOthers() if others is None else others))
    app.include_router(version_router(app.version))
    app.include_router(health_router(admission))
    pages = Pages(chat=chat_page, dashboard=dashboard is not None)
    app.include_router(pages.router)
    if dashboard is not None:
        app.include_router(dashboard_router(dashboard))
    install_error_handlers(app)
    describe_bodies(app, _BODIES)
    # The last one added is the outermost.
    app.add_middleware(Gate, keys=keys, public=pages.paths, client_certificates=options.client_certificates)
    if options.origins:
        app.add_middleware(cross_origin, origins=options.origins)
    app.add_middleware(Edge, options=options, public=pages.paths)
    return app
