"""What happens to every request that generates text, in this order: admission, body, schema, model, prompt, answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from tercet_frontend.api.body import read_json
from tercet_frontend.api.generation import GenerationResponse, Job
from tercet_frontend.api.parameters import choice_seeds, prompt_params
from tercet_frontend.edge import tenant_of
from tercet_frontend.schemas.common import GenerationFields
from tercet_frontend.schemas.validation import validate
from tercet_shared.errors import ModelNotFoundError, bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from starlette.requests import Request

    from tercet_frontend.admission import Admission
    from tercet_frontend.api.generation import AnswerShape
    from tercet_frontend.cores.interface import Cores, ServedModel
    from tercet_frontend.tokenizing import ModelText, PromptEncoder
    from tercet_shared.sampling_params import SamplingParams

F = TypeVar("F", bound=GenerationFields)
F_contra = TypeVar("F_contra", bound=GenerationFields, contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What endpoints work with.

    Attributes:
        admission: who is let in.
        encoder: makes prompt ids.
        max_body_bytes: largest body that is read.
    """

    admission: Admission
    encoder: PromptEncoder
    max_body_bytes: int


class EncodePrompts(Protocol[F_contra]):
    """Makes the prompts of a request; each endpoint has its own way."""

    async def __call__(
        self, encoder: PromptEncoder, text: ModelText, model: ServedModel, fields: F_contra, /
    ) -> Sequence[npt.NDArray[np.int32]]:
        """Returns int32[n] for each prompt, at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that generates text.

    Attributes:
        context: what it works with.
        shape: how it writes its answers.
        default_max_tokens: output tokens where nobody says; None takes the rest of the context.
    """

    context: ApiContext
    shape: AnswerShape
    default_max_tokens: int | None

    async def respond(self, request: Request, schema: type[F], encode: EncodePrompts[F]) -> GenerationResponse:
        """Returns the response to a request; generation starts when the response is called.

        Raises:
            RequestError: the request cannot be served as it was sent.
            UnavailableError: nothing can be served now.
        """
        context = self.context
        serving = context.admission.admit()
        text = serving.text
        fields = validate(schema, await read_json(request, context.max_body_bytes))
        model = find_model(serving.cores, fields.model)
        prompts = await encode(context.encoder, text, model, fields)
        count = fields.n or 1
        params: list[SamplingParams] = []
        for prompt in prompts:
            common = prompt_params(
                fields,
                text,
                model,
                prompt_tokens=len(prompt),
                default_max_tokens=self.default_max_tokens,
            )
            params.extend(replace(common, seed=seed) for seed in choice_seeds(fields.seed, count))
        job = Job(
            model=fields.model,
            prompts=prompts,
            choices_per_prompt=count,
            params=params,
            stop=fields.stops,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            tenant=tenant_of(request.scope),
        )
        return GenerationResponse(job, self.shape, serving, context.admission)


def find_model(cores: Cores, name: str) -> ServedModel:
    """Returns the served model of that name.

    Raises:
        ModelNotFoundError: there is none.
    """
    for model in cores.models():
        if model.name == name:
            return model
    raise ModelNotFoundError(f"There is no model {bounded(name, 100)!r} here.", param="model")
