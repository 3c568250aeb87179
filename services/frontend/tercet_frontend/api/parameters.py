"""From a request's fields to sampling parameters: defaults, limits, seeds, excluded words."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, TypeVar

from tercet_shared.errors import ContextLengthError, InvalidRequestError
from tercet_shared.sampling_params import SamplingParams, mix_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.cores.interface import ServedModel
    from tercet_frontend.schemas.common import GenerationFields
    from tercet_frontend.tokenizing import ModelText

N = TypeVar("N", int, float)

_ALL = -1
"""vLLM's word for "all" in ``top_k`` (ours is 0) and for "what fits" in ``truncate_prompt_tokens``."""


def prompt_params(
    fields: GenerationFields,
    text: ModelText,
    model: ServedModel,
    *,
    prompt_tokens: int,
    default_max_tokens: int | None,
) -> SamplingParams:
    """Returns the checked parameters of one prompt's choices, without their seeds.

    Args:
        fields: the request.
        text: of the model, with its defaults and end-of-sequence ids.
        model: as it is served now.
        prompt_tokens: fewer than the context.
        default_max_tokens: output tokens where neither request nor checkpoint says; None takes the rest of the context.

    Raises:
        InvalidRequestError: a value is out of range.
        ContextLengthError: prompt and output together exceed the context.
    """
    defaults = text.defaults
    top_k = _first(fields.top_k, defaults.top_k, 0)
    params = SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        top_k=0 if top_k == _ALL else top_k,
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        max_tokens=_max_tokens(fields, text, model, prompt_tokens, default_max_tokens),
        min_tokens=_first(fields.min_tokens, 0),
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids or ())),
        eos_token_ids=() if fields.ignore_eos else text.eos_token_ids,
        presence_penalty=_first(fields.presence_penalty, 0.0),
        frequency_penalty=_first(fields.frequency_penalty, 0.0),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=fields.logit_bias or (),
        allowed_token_ids=tuple(dict.fromkeys(fields.allowed_token_ids or ())),
        bad_words=_bad_words(text, fields.bad_words or ()),
        logprobs=fields.generated_logprobs(),
        prompt_logprobs=fields.scored_prompt_logprobs(),
    )
    params.check(vocab_size=model.vocab_size)
    return params


def prompt_limit(fields: GenerationFields, model: ServedModel) -> int | None:
    """Returns how many of a prompt's last tokens are to be kept; None keeps all.

    Raises:
        InvalidRequestError: the request asks for more than the context has.
    """
    return kept_tokens(fields.truncate_prompt_tokens, model, fields.requested_max_tokens()[0] or 1)


def kept_tokens(keep: int | None, model: ServedModel, answer: int = 1) -> int | None:
    """Returns what `prompt_limit` does.

    Args:
        keep: ``truncate_prompt_tokens``.
        model: as it is served now.
        answer: tokens that the context must have left.
    """
    if keep is None:
        return None
    if keep == _ALL:  # what the context has beside the answer
        return max(model.max_model_len - max(answer, 1), 1)
    if not 1 <= keep < model.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {model.max_model_len - 1}, not {keep}.",
            param="truncate_prompt_tokens",
        )
    return keep


def choice_seeds(seed: int | None, count: int) -> list[int]:
    """Returns a 64-bit seed for each choice of one prompt.

    They depend on nothing but the request's seed: the same prompt gives the same choices whatever stands beside it in
    the request. Without a seed they are random, and still fixed, so that an interrupted choice can be resumed.
    """
    if seed is None:
        return [secrets.randbits(64) for _ in range(count)]
    return [mix_seed(seed, index) for index in range(count)]


def _max_tokens(
    fields: GenerationFields, text: ModelText, model: ServedModel, prompt_tokens: int, default: int | None
) -> int:
    room = model.max_model_len - prompt_tokens
    requested, name = fields.requested_max_tokens()
    if requested is None:
        stated = text.defaults.max_new_tokens if text.defaults.max_new_tokens is not None else default
        return room if stated is None else min(stated, room)
    if fields.score_only:
        return 1
    if requested < 1:
        raise InvalidRequestError(f"{name} must be at least 1.", param=name)
    if requested > room:
        raise ContextLengthError(
            f"This model's context is {model.max_model_len} tokens; the prompt has {prompt_tokens}, so {name} can be "
            f"{room} at most, not {requested}.",
            param=name,
        )
    return requested


def _bad_words(text: ModelText, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of ``words``, each as it begins a text and as it follows a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelled in (word.lstrip(" "), " " + word.lstrip(" ")):
            ids = text.tokenizer.encode(spelled, add_special_tokens=False, allow_special=False)
            if ids:
                sequences[tuple(ids)] = None
    return tuple(sequences)


def _first(*values: N | None) -> N:
    """Returns the first value that is stated; the last always is."""
    return next(value for value in values if value is not None)
