"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as Anthropic's clients call them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.chat_job import MESSAGE_BYTES, chat_job, chat_prompt
from tercet_frontend.api.endpoint import ApiContext, Sender, receive
from tercet_frontend.api.errors import MESSAGES_PATH, JsonResponse
from tercet_frontend.api.generation import GenerationResponse
from tercet_frontend.api.message_blocks import MessagesShape
from tercet_frontend.api.openapi import body_of
from tercet_frontend.api.renaming import renamed
from tercet_frontend.schemas.anthropic import CountTokensRequest, MessagesRequest
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.validation import validate
from tercet_shared.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from tercet_frontend.admission import Serving

COUNTED = 262_144
"""Tokens up to which a conversation is counted that no model here could take."""

_NAMES = {
    "continue_final_message": "messages",
    "enable_thinking": "thinking",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
}
"""Fields of the chat request, and of the one that it is made of."""


def messages_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["messages"])
    shape = MessagesShape()

    @router.post(MESSAGES_PATH, response_class=Response, openapi_extra=body_of(MessagesRequest))
    async def create_message(request: Request) -> Response:
        """Continues a conversation."""
        serving, fields = await receive(request, context, MessagesRequest)
        with renamed(_NAMES):
            chat = await _chat(context, serving, fields)
            job = await chat_job(context, serving, chat, shape=shape, sender=Sender.of(request))
        return GenerationResponse(job, serving, context.admission)

    @router.post(
        f"{MESSAGES_PATH}/count_tokens", response_class=JsonResponse, openapi_extra=body_of(CountTokensRequest)
    )
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of a conversation, also of one that is too long for the model."""
        serving, fields = await receive(request, context, CountTokensRequest)
        limit = max(serving.model.max_model_len, COUNTED)
        try:
            with renamed(_NAMES):
                wide = replace(serving, model=replace(serving.model, max_model_len=limit + 1))
                ids = await chat_prompt(context, wide, await _chat(context, serving, fields))
        except ContextLengthError:
            raise InvalidRequestError(
                f"messages: there are more than {limit} tokens, which are not counted.", param="messages"
            ) from None
        return JsonResponse({"input_tokens": len(ids)})

    return router


async def _chat(context: ApiContext, serving: Serving, fields: CountTokensRequest) -> ChatRequest:
    """Returns the chat request that asks for the same."""
    return await context.beside(lambda: _as_chat(serving, fields), len(fields.messages) * MESSAGE_BYTES)


def _as_chat(serving: Serving, fields: CountTokensRequest) -> ChatRequest:
    body = fields.chat()
    template = serving.text.chat_template
    if template is None or "enable_thinking" not in template.text:
        # Whether such a model thinks is not up to its prompt.
        body.pop("enable_thinking", None)
    return validate(ChatRequest, body)
