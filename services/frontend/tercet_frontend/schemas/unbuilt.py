"""Request fields that clients know from OpenAI or vLLM and that are not built: accepted where they change nothing.

A field that is in neither a schema nor this table is unknown, and ignored. ``null`` is always accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tercet_shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

Neutral = tuple[object, ...]
"""Values that ask for what happens anyway."""

_BOTH: dict[str, Neutral] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT: dict[str, Neutral] = {
    **_BOTH,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of ``/v1/chat/completions``."""

COMPLETION: dict[str, Neutral] = {
    **_BOTH,
    "add_special_tokens": (True,),
    "echo": (False,),
    "logprobs": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Fields of ``/v1/completions``."""

MESSAGE: dict[str, Neutral] = {
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""Fields of one chat message."""

STREAM_OPTIONS: dict[str, Neutral] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
"""Fields of ``stream_options``."""


def refuse_unbuilt(raw: Mapping[str, Any], table: Mapping[str, Neutral], path: str = "") -> None:
    """Raises `InvalidRequestError` for the first field in ``raw`` that asks for something that is not built.

    Args:
        raw: the JSON object as it was sent.
        table: one of the tables of this module.
        path: where in the request the object is, with a trailing dot; empty for the request itself.
    """
    for name in raw.keys() & table.keys():
        value = raw[name]
        if value is not None and not any(_same(value, neutral) for neutral in table[name]):
            raise InvalidRequestError(f"{path}{name} is not supported with this value.", param=f"{path}{name}")


def _same(value: object, neutral: object) -> bool:
    # In Python False equals 0, in JSON it does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
