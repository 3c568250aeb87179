"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.completion_shape import CompletionShape
from tercet_frontend.api.endpoint import ApiContext, Sender, make_job, receive
from tercet_frontend.api.generation import GenerationResponse
from tercet_frontend.api.logprobs import TokenNames
from tercet_frontend.api.openapi import body_of
from tercet_frontend.api.parameters import prompt_limit
from tercet_frontend.api.plain_route import PlainRoute
from tercet_frontend.schemas.completion import CompletionRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def completions_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["completions"], route_class=PlainRoute)

    @router.post("/v1/completions", response_class=Response, openapi_extra=body_of(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continues prompts."""
        serving, fields = await receive(request, context, CompletionRequest)
        keep = prompt_limit(fields, serving.model)
        prompts = await context.encoder.prompts(
            serving.text,
            serving.model,
            fields.prompt,
            add_special_tokens=fields.add_special_tokens is not False,
            keep=keep,
        )
        shape = CompletionShape(
            names=TokenNames(serving.text.detokenizer, as_ids=bool(fields.return_tokens_as_token_ids)),
            echo=bool(fields.echo),
            prompts=[prompt if isinstance(prompt, str) and keep is None else None for prompt in fields.prompt],
            choices_per_prompt=fields.n or 1,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            token_ids=bool(fields.return_token_ids),
            include_usage=fields.include_usage,
            continuous_usage=fields.continuous_usage,
        )
        job = make_job(
            fields,
            serving=serving,
            prompts=prompts,
            shape=shape,
            sender=Sender.of(request),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            detail=fields.continuous_usage,
            prompt_detail=shape.echo or shape.token_ids or shape.prompt_logprobs is not None,
        )
        return GenerationResponse(job, serving, context.admission)

    return router
