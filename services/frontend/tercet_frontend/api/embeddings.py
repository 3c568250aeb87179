"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request, Response

from tercet_frontend.access.exchange import exchange_of
from tercet_frontend.api.endpoint import receive
from tercet_frontend.api.errors import JsonResponse
from tercet_frontend.api.openapi import body_of
from tercet_frontend.api.parameters import kept_tokens
from tercet_frontend.cores.interface import GenerationRequest
from tercet_frontend.schemas.embeddings import EmbeddingRequest
from tercet_shared.errors import InternalError, InvalidRequestError
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tercet_frontend.access.exchange import Exchange
    from tercet_frontend.api.endpoint import ApiContext
    from tercet_frontend.cores.interface import Cores, Generation

# Decoders see everything in the last token's state; it is also what most embedding models of this kind were trained on.
_POOLINGS = {None: Pooling.LAST, "last": Pooling.LAST, "mean": Pooling.MEAN}


def embeddings_router(context: ApiContext) -> APIRouter:
    """Returns the route."""
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", response_class=Response, openapi_extra=body_of(EmbeddingRequest))
    async def create_embeddings(request: Request) -> Response:
        """Makes a vector of each text."""
        serving, fields = await receive(request, context, EmbeddingRequest)
        exchange = exchange_of(request.scope)
        priority = exchange.priority(fields.priority)
        prompts = await context.encoder.prompts(
            serving.text,
            serving.model,
            fields.input,
            add_special_tokens=fields.add_special_tokens is not False,
            keep=kept_tokens(fields.truncate_prompt_tokens, serving.model),
            param="input",
        )
        identity, tenant = f"embd-{token_hex(16)}", exchange.key.owner
        batch = _Batch(serving.cores, identity, serving.target, prompts, _POOLINGS[fields.pooling], priority, exchange)
        ids = (identity, exchange.request_id)
        vectors = await context.admission.run(request.receive, batch.run(), tenant=tenant, ids=ids)
        tokens = sum(len(prompt) for prompt in prompts)
        exchange.began()
        exchange.used(tokens, 0)

        def answer() -> JsonResponse:
            data = [
                {"object": "embedding", "index": index, "embedding": _written(_scaled(vector, fields), fields)}
                for index, vector in enumerate(vectors)
            ]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return JsonResponse({"object": "list", "data": data, "model": fields.model, "usage": usage})

        return await context.encoder.run(answer, sum(len(vector) for vector in vectors))

    return router


@dataclass(frozen=True, slots=True)
class _Batch:
    """The texts of one request: all are handed over at once, so that the core may compute them together."""

    cores: Cores
    identity: str
    model: str
    prompts: Sequence[npt.NDArray[np.int32]]
    pooling: Pooling
    priority: int
    exchange: Exchange

    async def run(self) -> list[npt.NDArray[np.float32]]:
        """Returns a vector for each prompt, float32[hidden size]. Whatever happens, no generation is left running.

        Raises:
            TercetError: one of them failed, and with it the request.
        """
        generations: list[Generation] = []
        try:
            for prompt in self.prompts:
                generations.append(self._submit(prompt))  # noqa: PERF401  # those before a failure are needed
            # One after the other: each keeps what came for it until it is asked.
            return [await _vector(generation) for generation in generations]
        except BaseException:
            for generation in generations:
                generation.abort("the request is over")
            raise

    def _submit(self, prompt: npt.NDArray[np.int32]) -> Generation:
        return self.exchange.watch.submit(
            self.cores.submit,
            GenerationRequest(
                request_id=self.identity,
                model=self.model,
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=1),
                priority=self.priority,
                tenant=self.exchange.key.owner,
                cache_salt=self.exchange.key.owner,
                traceparent=self.exchange.traceparent,
                pooling=self.pooling,
                session=self.exchange.session,
            ),
        )


async def _vector(generation: Generation) -> npt.NDArray[np.float32]:
    pooled: npt.NDArray[np.float32] | None = None
    finished = False
    while not finished:
        tokens = await generation.next()
        pooled = tokens.pooled if tokens.pooled is not None else pooled
        finished = tokens.finished is not None
    if pooled is None:
        raise InternalError("The core ended the request without a vector.")
    return pooled


def _scaled(vector: npt.NDArray[np.float32], fields: EmbeddingRequest) -> npt.NDArray[np.float32]:
    """Returns the vector as it was asked for: shortened, and of length 1."""
    if fields.dimensions is not None:
        if fields.dimensions > len(vector):
            raise InvalidRequestError(
                f"dimensions: the vectors of this model have {len(vector)} elements.", param="dimensions"
            )
        vector = vector[: fields.dimensions]
    if fields.normalize is False:
        return vector
    length = np.sqrt(np.sum(np.square(vector, dtype=np.float64)))
    return vector if length == 0 else (vector / length).astype(np.float32)


def _written(vector: npt.NDArray[np.float32], fields: EmbeddingRequest) -> Any:
    if fields.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    return vector.tolist()
