"""All formats by the names that settings have for them, and which of them a model uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.parsing.reasoning import FORMATS
from tercet_frontend.parsing.tools.deepseek import CALLS as DEEPSEEK_CALLS
from tercet_frontend.parsing.tools.deepseek import DeepSeek, DeepSeekFenced
from tercet_frontend.parsing.tools.hermes import OPEN as HERMES_OPEN
from tercet_frontend.parsing.tools.hermes import Hermes
from tercet_frontend.parsing.tools.llama import PYTHON_TAG, LlamaJson
from tercet_frontend.parsing.tools.mistral import ARGS, CALLS, Mistral, MistralNamed
from tercet_frontend.parsing.tools.plain import PlainJson
from tercet_frontend.parsing.tools.pythonic import Pythonic
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tercet_frontend.parsing.reasoning import ReasoningFormat
    from tercet_frontend.parsing.tools.base import ToolFormat

AUTO, NONE = "auto", "none"

PLAIN = PlainJson()
HERMES = Hermes()

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    known.name: known
    for known in (HERMES, LlamaJson(), Pythonic(), Mistral(), MistralNamed(), DeepSeekFenced(), DeepSeek(), PLAIN)
}
"""Formats of tool calls."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {known.name: known for known in FORMATS}
"""Formats of reasoning."""

_ALIASES = {
    "deepseek": "deepseek_v3",
    "generic": "json",
    "llama": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen": "hermes",
    "qwen3": "hermes",
}
_REASONING_ALIASES = {"deepseek-r1": "deepseek_r1", "qwen3": "think", "r1": "deepseek_r1"}


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """Returns the format of tool calls for a setting.

    Args:
        name: a name of `TOOL_FORMATS`, ``auto`` or ``none``.
        template: text of the model's chat template, for ``auto``; None where there is none.

    Raises:
        ConfigurationError: there is no format of that name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        return _detected(template or "")
    found = TOOL_FORMATS.get(_ALIASES.get(name, name))
    if found is None:
        raise _unknown("tool_call_parser", name, TOOL_FORMATS)
    return found


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Returns the format of reasoning for a setting; arguments and errors as in `tool_format`."""
    if name == NONE:
        return None
    if name == AUTO:
        # Tags that a template takes out of earlier answers, or puts before the next.
        return next((known for known in FORMATS if template and known.closes in template), None)
    found = REASONING_FORMATS.get(_REASONING_ALIASES.get(name, name))
    if found is None:
        raise _unknown("reasoning_parser", name, REASONING_FORMATS)
    return found


def knows_tools(template: str) -> bool:
    """Whether a chat template shows the functions of a request to the model."""
    return "tools" in template or "custom_tools" in template


def _detected(template: str) -> ToolFormat | None:
    """Returns the format that a template teaches; Hermes where it knows no tools, which are then described so."""
    if CALLS in template:
        return TOOL_FORMATS["mistral_v11" if ARGS in template else "mistral"]
    if DEEPSEEK_CALLS in template:
        return TOOL_FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if HERMES_OPEN in template:
        # Some put XML into the tag instead of JSON, which nothing here reads.
        return None if "<function=" in template else HERMES
    if not knows_tools(template):
        return HERMES
    if PYTHON_TAG in template or '"parameters": ' in template:
        return TOOL_FORMATS["llama3_json"]
    if "<|python_start|>" in template or "func_name1(" in template:
        return TOOL_FORMATS["pythonic"]
    return PLAIN


def _unknown(param: str, name: str, known: Mapping[str, object]) -> ConfigurationError:
    flag = param.replace("_", "-")
    names = ", ".join([AUTO, NONE, *known])
    return ConfigurationError(f"--{flag}: there is no parser {name!r}; known are {names}.", param=param)
