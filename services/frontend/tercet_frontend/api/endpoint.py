"""From an HTTP request to a job, in steps that endpoints put together: admission, body, schema, model, prompt, job."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tercet_frontend.access.exchange import Exchange, exchange_of
from tercet_frontend.access.quotas import Grant, LocalQuotas, guessed_tokens
from tercet_frontend.api.body import parsed, read_body
from tercet_frontend.api.generation import Job
from tercet_frontend.api.parameters import choice_seeds, prompt_params
from tercet_frontend.api.scope import serving_of
from tercet_frontend.api.sessions import session_of
from tercet_frontend.schemas.validation import validate
from tercet_shared.sampling_params import OFF

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from starlette.requests import Request

    from tercet_frontend.access.quotas import Quotas
    from tercet_frontend.admission import Admission, Models, Serving
    from tercet_frontend.api.answers import AnswerShape, ParserFactory
    from tercet_frontend.schemas.asked import Asked
    from tercet_frontend.schemas.common import GenerationFields
    from tercet_frontend.tokenizing import PromptEncoder
    from tercet_shared.sampling_params import SamplingParams
    from tercet_shared.structured import Grammar


T = TypeVar("T", bound="Asked")
R = TypeVar("R")

LARGE_BODY: Final = 32 * 1024
"""Bytes of JSON that are parsed and checked in a few milliseconds at most, whatever they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What endpoints work with.

    Attributes:
        admission: who is let in.
        encoder: makes prompt ids.
        max_body_bytes: largest body that is read.
        receive_timeout: seconds in which a body has to come; None sets no limit.
        quotas: what keys may use.
    """

    admission: Admission
    encoder: PromptEncoder
    max_body_bytes: int
    receive_timeout: float | None = None
    quotas: Quotas = field(default_factory=LocalQuotas)

    async def beside(self, work: Callable[[], R], size: int) -> R:
        """Returns what ``work`` returns; for a large request it is done in a thread, so that others get their turns.

        Args:
            work: is safe to run in a thread.
            size: of what it works on, in bytes of JSON.
        """
        return work() if size <= LARGE_BODY else await self.encoder.beside(work)


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a request.

    Attributes:
        tenant: whose it is; empty without API keys.
        request_id: the one in ``X-Request-Id``.
        exchange: is told what the request costs and how it ends.
    """

    tenant: str = ""
    request_id: str = ""
    exchange: Exchange = field(default_factory=Exchange)

    @classmethod
    def of(cls, request: Request) -> Sender:
        """Returns who sent ``request``."""
        exchange = exchange_of(request.scope)
        return cls(exchange.key.owner, exchange.request_id, exchange)


async def receive(request: Request, context: ApiContext, kind: type[T]) -> tuple[Serving, T]:
    """Returns what an admitted request works with, and its checked body.

    Raises:
        TercetError: see `receive_json` and `serving_for`.
        InvalidRequestError: a field is wrong.
    """
    models, raw, size = await receive_json(request, context)
    fields = await context.beside(lambda: validate(kind, raw), size)
    return serving_for(request, models, fields), fields


def serving_for(request: Request, models: Models, fields: Asked) -> Serving:
    """Returns what a request works with: the model that it asks for, if its key may use it.

    Raises:
        ModelNotFoundError: there is none of that name.
        UnavailableError: it cannot be served now.
    """
    exchange = exchange_of(request.scope)
    exchange.session = session_of(request, fields)
    serving = serving_of(models, exchange.key, fields.model, exchange.session)
    exchange.model, exchange.target = serving.model.name, serving.target
    return serving


async def receive_json(request: Request, context: ApiContext) -> tuple[Models, dict[str, Any], int]:
    """Returns what an admitted request may ask for, its JSON body, and the body's size in bytes.

    Whether there is room for it, here and in its key's quota, is decided before anything is done for it.

    Raises:
        UnavailableError: nothing can be served now; then the body was not read.
        OverloadedError: there is no room.
        RequestError: the body is no JSON object, too large, or did not come in time.
    """
    models = context.admission.admit()
    exchange = exchange_of(request.scope)
    exchange.occupies(context.admission.occupancy.enter())
    grant = Grant(exchange.key)
    exchange.charges(context.quotas, grant)
    await context.quotas.enter(grant)
    body = await read_body(request, context.max_body_bytes, context.receive_timeout)
    raw = await context.beside(lambda: parsed(body), len(body))
    await context.quotas.reserve(grant, guessed_tokens(raw, len(body)))
    return models, raw, len(body)


def make_job(
    fields: GenerationFields,
    *,
    serving: Serving,
    prompts: Sequence[npt.NDArray[np.int32]],
    shape: AnswerShape,
    sender: Sender,
    default_max_tokens: int | None = None,
    parser: ParserFactory | None = None,
    grammar: Grammar | None = None,
    detail: bool = False,
    prompt_detail: bool = False,
) -> Job:
    """Returns the job that a checked request asks for.

    Args:
        fields: the request.
        serving: what it works with.
        prompts: int32[n] each, at least one, shorter than the context.
        shape: how its answer is written.
        sender: who sent it.
        default_max_tokens: output tokens where neither request nor checkpoint says; None takes the rest of the context.
        parser: makes the parsers of the choices; None makes all text content.
        grammar: instead of the one that the fields ask for, which is taken where this is None.
        detail: whether the shape needs tokens with the events.
        prompt_detail: whether it needs the prompt's as well; implies ``detail``.

    Raises:
        InvalidRequestError: a value is out of range.
        ContextLengthError: prompt and output together exceed the context.
    """
    priority = sender.exchange.priority(fields.priority)
    generated = fields.generated_per_prompt
    params: list[SamplingParams] = []
    for prompt in prompts:
        common = prompt_params(
            fields, serving.text, serving.model, prompt_tokens=len(prompt), default_max_tokens=default_max_tokens
        )
        params.extend(replace(common, seed=seed) for seed in choice_seeds(fields.seed, generated))
    return Job(
        model=fields.model,
        shape=shape,
        prompts=prompts,
        params=params,
        choices_per_prompt=fields.n or 1,
        stop=fields.stops,
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        parser=parser,
        grammar=fields.grammar if grammar is None else grammar,
        detail=detail or prompt_detail or params[0].logprobs != OFF,
        prompt_detail=prompt_detail,
        score_only=fields.score_only,
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        tenant=sender.tenant,
        cache_salt=_salt(sender.tenant, fields.cache_salt),
        priority=priority,
        queue_timeout=fields.queue_timeout or 0.0,
        request_id=sender.request_id,
        exchange=sender.exchange,
    )


def _salt(tenant: str, salt: str | None) -> str:
    # Tenants have no slash in their names, so that no salt of one is another's.
    return tenant if salt is None else f"{tenant}/{salt}"
