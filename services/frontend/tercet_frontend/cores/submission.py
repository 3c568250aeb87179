"""A choice as the core is told of it: the first time, and again with what came of it so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_proto.v1 import engine_pb2
from tercet_shared.sampling_params import OFF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_shared.sampling_params import SamplingParams


def submit_message(
    request: GenerationRequest,
    handle: int,
    *,
    attempt: int = 0,
    resumed: Sequence[int] = (),
    queue_timeout: float = 0.0,
) -> engine_pb2.Submit:
    """Returns the Submit of one attempt.

    Args:
        request: the same in all attempts; its limits count from the original prompt.
        handle: the choice's number on the stream.
        attempt: 0 first.
        resumed: output tokens that earlier attempts yielded.
        queue_timeout: seconds that are left of the request's; 0: no limit.
    """
    grammar = request.grammar
    return engine_pb2.Submit(
        handle=handle,
        attempt=attempt,
        request_id=request.request_id,
        prompt_ids=request.prompt_ids.astype("<i4", copy=False).tobytes(),
        resumed_ids=np.array(resumed, "<i4").tobytes() if resumed else b"",
        sampling=_sampling(request.params),
        queue_deadline_s=queue_timeout,
        tenant=request.tenant,
        priority=request.priority,
        traceparent=request.traceparent,
        cache_salt=request.cache_salt,
        grammar=None
        if grammar is None
        else engine_pb2.Grammar(
            kind=grammar.kind.value,  # type: ignore[arg-type]  # the enum's values are the wire's
            text=grammar.text,
            param=grammar.param,
        ),
        pooling=request.pooling.value,  # type: ignore[arg-type]  # likewise
    )


def _sampling(params: SamplingParams) -> engine_pb2.Sampling:
    return engine_pb2.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        eos_token_ids=params.eos_token_ids,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=None if params.repetition_penalty == 1.0 else params.repetition_penalty,
        bias_ids=[token for token, _ in params.logit_bias],
        bias_values=[value for _, value in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[engine_pb2.TokenIds(ids=word) for word in params.bad_words],
        logprobs=None if params.logprobs == OFF else params.logprobs,
        prompt_logprobs=None if params.prompt_logprobs == OFF else params.prompt_logprobs,
    )
