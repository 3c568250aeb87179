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
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "repetition_detection": (),
    "structural_tag": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

CHAT: dict[str, Neutral] = {
    **_BOTH,
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of ``/v1/chat/completions``."""

COMPLETION: dict[str, Neutral] = {
    **_BOTH,
    "prompt_embeds": (),
    "suffix": ("",),
}
"""Fields of ``/v1/completions``."""

STRUCTURED_OUTPUTS: dict[str, Neutral] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
"""Fields of ``structured_outputs``."""

MESSAGE: dict[str, Neutral] = {
    "audio": (),
    "function_call": (),
    "refusal": (),
}
"""Fields of one chat message."""

STREAM_OPTIONS: dict[str, Neutral] = {
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
