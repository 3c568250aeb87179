"""The job of a conversation, whatever its answer looks like: chat completions, responses and messages share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.api.endpoint import make_job
from tercet_frontend.api.parameters import prompt_limit
from tercet_frontend.rendering import plan_chat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.admission import Serving
    from tercet_frontend.api.answers import AnswerShape
    from tercet_frontend.api.endpoint import ApiContext, Sender
    from tercet_frontend.api.generation import Job
    from tercet_frontend.cores.interface import ServedModel
    from tercet_frontend.rendering import ChatPlan
    from tercet_frontend.schemas.chat import ChatRequest
    from tercet_frontend.tokenizing import ChatPrompt

MESSAGE_BYTES = 128
"""A message of a conversation costs about as much to handle as so many bytes of JSON."""


async def chat_prompt(context: ApiContext, serving: Serving, fields: ChatRequest) -> npt.NDArray[np.int32]:
    """Returns the ids of the conversation in ``fields``, int32[n].

    Raises:
        TemplateError: the model's template refused it.
        InvalidRequestError: the model has no template, or it does not take what is asked for.
        ContextLengthError: it is too long.
    """
    return (await _rendered(context, await _planned(context, serving, fields), serving.model)).ids


async def chat_job(
    context: ApiContext,
    serving: Serving,
    fields: ChatRequest,
    *,
    shape: AnswerShape,
    sender: Sender,
    detail: bool = False,
    prompt_detail: bool = False,
) -> Job:
    """Returns the job that a conversation asks for.

    Args:
        context: what endpoints work with.
        serving: what the request works with.
        fields: the conversation, its tools and parameters.
        shape: how the answer is written.
        sender: who sent it.
        detail: whether the shape needs tokens with the events.
        prompt_detail: whether it needs the prompt's as well.

    Raises:
        RequestError: see `chat_prompt` and `make_job`.
    """
    plan = await _planned(context, serving, fields)
    prompt = await _rendered(context, plan, serving.model)
    return make_job(
        fields,
        serving=serving,
        prompts=[prompt.ids],
        shape=shape,
        sender=sender,
        parser=plan.parser(prompt.end),
        grammar=plan.grammar(prompt.end),
        detail=detail,
        prompt_detail=prompt_detail,
    )


async def _planned(context: ApiContext, serving: Serving, fields: ChatRequest) -> ChatPlan:
    return await context.beside(lambda: plan_chat(serving.text, fields), len(fields.messages) * MESSAGE_BYTES)


async def _rendered(context: ApiContext, plan: ChatPlan, model: ServedModel) -> ChatPrompt:
    fields = plan.fields
    return await context.encoder.chat(
        plan.text,
        model,
        plan.conversation,
        add_special_tokens=bool(fields.add_special_tokens),
        keep=prompt_limit(fields, model),
    )
