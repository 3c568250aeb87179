"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.endpoint import ApiContext, Endpoint
from tercet_frontend.api.openapi import body_of
from tercet_frontend.schemas.completion import CompletionRequest
from tercet_frontend.sse import CompletionChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.api.generation import FinishedChoice
    from tercet_frontend.cores.interface import ServedModel
    from tercet_frontend.tokenizing import ModelText, PromptEncoder

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionShape:
    """Answers as text completions."""

    identity_prefix = "cmpl-"

    def chunks(self, *, identity: str, created: int, model: str, include_usage: bool) -> CompletionChunks:
        """Returns the encoder of a streamed answer."""
        return CompletionChunks(identity=identity, created=created, model=model, include_usage=include_usage)

    def body(self, *, identity: str, created: int, model: str, choices: Sequence[FinishedChoice]) -> dict[str, Any]:
        """Returns a whole answer without its usage."""
        return {
            "id": identity,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
        }


def completions_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["completions"])
    endpoint = Endpoint(context=context, shape=CompletionShape(), default_max_tokens=DEFAULT_MAX_TOKENS)

    @router.post("/v1/completions", response_class=Response, openapi_extra=body_of(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continues prompts."""
        return await endpoint.respond(request, CompletionRequest, _prompts)

    return router


async def _prompts(
    encoder: PromptEncoder, text: ModelText, model: ServedModel, fields: CompletionRequest
) -> list[npt.NDArray[np.int32]]:
    return await encoder.prompts(text, model, fields.prompt)
