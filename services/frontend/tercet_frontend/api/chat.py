"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.chat_job import chat_job
from tercet_frontend.api.chat_shape import ChatShape
from tercet_frontend.api.endpoint import ApiContext, Sender, receive
from tercet_frontend.api.generation import GenerationResponse
from tercet_frontend.api.logprobs import TokenNames
from tercet_frontend.api.openapi import body_of
from tercet_frontend.api.plain_route import PlainRoute
from tercet_frontend.schemas.chat import ChatRequest


def chat_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["chat"], route_class=PlainRoute)

    @router.post("/v1/chat/completions", response_class=Response, openapi_extra=body_of(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Continues a conversation."""
        serving, fields = await receive(request, context, ChatRequest)
        shape = ChatShape(
            names=TokenNames(serving.text.detokenizer, as_ids=bool(fields.return_tokens_as_token_ids)),
            echo=fields.echoed,
            logprobs=fields.shown_logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            token_ids=bool(fields.return_token_ids),
            include_usage=fields.include_usage,
            continuous_usage=fields.continuous_usage,
        )
        job = await chat_job(
            context,
            serving,
            fields,
            shape=shape,
            sender=Sender.of(request),
            detail=fields.continuous_usage,
            prompt_detail=shape.token_ids or shape.prompt_logprobs is not None,
        )
        return GenerationResponse(job, serving, context.admission)

    return router
