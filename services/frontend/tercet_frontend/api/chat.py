"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.endpoint import ApiContext, Endpoint
from tercet_frontend.api.openapi import body_of
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.sse import ChatChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.api.generation import FinishedChoice
    from tercet_frontend.cores.interface import ServedModel
    from tercet_frontend.tokenizing import ModelText, PromptEncoder


class ChatShape:
    """Answers as chat completions."""

    identity_prefix = "chatcmpl-"

    def chunks(self, *, identity: str, created: int, model: str, include_usage: bool) -> ChatChunks:
        """Returns the encoder of a streamed answer."""
        return ChatChunks(identity=identity, created=created, model=model, include_usage=include_usage)

    def body(self, *, identity: str, created: int, model: str, choices: Sequence[FinishedChoice]) -> dict[str, Any]:
        """Returns a whole answer without its usage."""
        return {
            "id": identity,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
        }


def chat_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["chat"])
    endpoint = Endpoint(context=context, shape=ChatShape(), default_max_tokens=None)

    @router.post("/v1/chat/completions", response_class=Response, openapi_extra=body_of(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Continues a conversation."""
        return await endpoint.respond(request, ChatRequest, _prompts)

    return router


async def _prompts(
    encoder: PromptEncoder, text: ModelText, model: ServedModel, fields: ChatRequest
) -> list[npt.NDArray[np.int32]]:
    return [await encoder.chat(text, model, fields.messages)]
