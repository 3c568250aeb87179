"""Defaults of sampling parameters, limits of the context, seeds."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tercet_frontend.api.parameters import choice_seeds, prompt_params
from tercet_frontend.cores.interface import ServedModel
from tercet_frontend.schemas.completion import CompletionRequest
from tercet_frontend.tokenizing import ModelText
from tercet_shared.checkpoint import GenerationDefaults
from tercet_shared.errors import ContextLengthError
from tercet_shared.sampling_params import mix_seed

MODEL = ServedModel("m", max_model_len=100, vocab_size=50)


def _text(**defaults: Any) -> ModelText:
    nothing = cast("Any", None)
    return ModelText(nothing, nothing, None, GenerationDefaults(**defaults), (2, 3))


def _params(text: ModelText, prompt_tokens: int = 60, default: int | None = None, **fields: Any) -> Any:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "a"} | fields)
    return prompt_params(request, text, MODEL, prompt_tokens=prompt_tokens, default_max_tokens=default)


def test_without_any_defaults() -> None:
    params = _params(_text())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens) == (40, 0)
    assert params.eos_token_ids == (2, 3)


def test_the_checkpoint_is_asked_first_and_the_request_wins() -> None:
    text = _text(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, max_new_tokens=9)
    params = _params(text, default=16)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.125)
    assert params.max_tokens == 9
    params = _params(text, temperature=0, top_p=1, top_k=0, min_p=0, max_tokens=40, ignore_eos=True)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 1, 0, 0)
    assert (params.max_tokens, params.eos_token_ids) == (40, ())


@pytest.mark.parametrize(("prompt", "default", "expected"), [(60, 16, 16), (90, 16, 10), (99, None, 1), (1, None, 99)])
def test_defaults_never_exceed_the_context(prompt: int, default: int | None, expected: int) -> None:
    assert _params(_text(), prompt, default).max_tokens == expected


def test_what_was_asked_for_may_not_exceed_it() -> None:
    assert _params(_text(), 60, max_tokens=40).max_tokens == 40
    with pytest.raises(ContextLengthError, match="can be 40 at most") as caught:
        _params(_text(), 60, max_tokens=41)
    assert caught.value.param == "max_tokens"


def test_seeds() -> None:
    assert choice_seeds(5, 3) == [mix_seed(5, index) for index in range(3)]
    assert choice_seeds(5, 1) == choice_seeds(5, 3)[:1]
    random = choice_seeds(None, 100)
    assert len(set(random)) == 100
    assert max(random) < 2**64
    assert max(random) > 2**32
    assert all(0 <= seed < 2**64 for seed in choice_seeds(-1, 10))
