"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tercet_frontend.api.chat_job import chat_prompt
from tercet_frontend.api.endpoint import ApiContext, receive, receive_json, serving_for
from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.api.openapi import body_of
from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from tercet_frontend.schemas.validation import validate
from tercet_shared.errors import InvalidRequestError


def tokenize_router(context: ApiContext) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", response_class=JsonResponse, openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Makes tokens of a text, or of a conversation as the model would see it."""
        models, raw, size = await receive_json(request, context)
        fields = await context.beside(lambda: validate(TokenizeRequest, raw), size)
        serving = serving_for(request, models, fields)
        model = serving.model
        tokenizer = serving.text.tokenizer
        if fields.prompt is not None:
            prompt = fields.prompt
            special = fields.add_special_tokens is not False
            ids = await context.encoder.run(lambda: tokenizer.encode(prompt, add_special_tokens=special), len(prompt))
        else:
            chat = await context.beside(lambda: validate(ChatRequest, {**raw, "model": model.name}), size)
            ids = (await chat_prompt(context, serving, chat)).tolist()

        def answer() -> JsonResponse:
            names = [tokenizer.token(token) for token in ids] if fields.return_token_strs else None
            body = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": names}
            return JsonResponse(body)

        return await context.encoder.run(answer, len(ids))

    @router.post("/detokenize", response_class=JsonResponse, openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Makes text of tokens, special ones included."""
        serving, fields = await receive(request, context, DetokenizeRequest)
        model = serving.model
        if fields.tokens and not 0 <= min(fields.tokens) <= max(fields.tokens) < model.vocab_size:
            raise InvalidRequestError(
                f"tokens has an id that is not in the vocabulary (0 to {model.vocab_size - 1}).", param="tokens"
            )
        tokenizer = serving.text.tokenizer
        text = await context.encoder.run(
            lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False), len(fields.tokens)
        )
        return JsonResponse({"prompt": text})

    return router
