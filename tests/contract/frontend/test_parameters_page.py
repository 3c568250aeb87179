"""``docs/parameters.md`` says what happens: every parameter on it is sent to the real application."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
import pytest_asyncio

from tercet_frontend.schemas.chat import ChatRequest
from tercet_frontend.schemas.completion import CompletionRequest
from tercet_frontend.schemas.unbuilt import CHAT, COMPLETION
from tercet_shared.checkpoint import ChatTemplate
from tests.contract.frontend.conftest import MODEL, FrontEnd, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tercet_frontend.tokenizing import ModelText

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[3] / "docs" / "parameters.md"
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
_ROW = re.compile(r"\| `([a-z_]+)` \| (\w+|—) \| (\w+|—) \|(.*)\|")
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ROWS = {match[1]: (match[2], match[3]) for line in PAGE.read_text().splitlines() if (match := _ROW.fullmatch(line))}

VALUES: dict[str, Any] = {
    # A value that asks for something, for each parameter.
    "add_generation_prompt": True, "add_special_tokens": True, "allowed_token_ids": [5], "audio": {"voice": "alloy"},
    "bad_words": ["a"], "best_of": 2, "cache_salt": "s", "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"a": 1}, "continue_final_message": False, "documents": [{"text": "a"}], "echo": True,
    "enable_thinking": True,
    "frequency_penalty": 1, "function_call": {"name": "f"}, "functions": [{"name": "f"}], "guided_choice": ["a"],
    "guided_decoding_backend": "xgrammar", "guided_grammar": 'root ::= "a"', "guided_json": {"type": "object"},
    "guided_regex": "a", "guided_whitespace_pattern": " ", "ignore_eos": True, "include_reasoning": True,
    "include_stop_str_in_output": True, "kv_transfer_params": {"a": 1}, "length_penalty": 2, "logit_bias": {"5": 1},
    "logits_processors": ["a"], "logprobs": {CHAT_PATH: True, COMPLETION_PATH: 1}, "max_completion_tokens": 5,
    "max_tokens": 5, "media_io_kwargs": {"a": 1}, "messages": [{"role": "user", "content": "Hi"}],
    "metadata": {"a": "b"}, "min_p": 0.5, "min_tokens": 1, "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"], "model": MODEL, "moderation": {"a": 1}, "n": 2, "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "a"}, "presence_penalty": 1, "priority": 1, "prompt": "a",
    "prompt_cache_key": "a", "prompt_cache_options": {"a": 1}, "prompt_cache_retention": "24h", "prompt_embeds": "a",
    "prompt_logprobs": 1, "queue_timeout": 5, "reasoning_effort": "high", "repetition_detection": {"a": 1},
    "repetition_penalty": 2, "request_id": "a", "response_format": {"type": "json_object"}, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "safety_identifier": "a", "seed": 5, "service_tier": "flex",
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "stop": "a", "stop_token_ids": [5],
    "store": True, "stream": True, "stream_options": {"include_usage": True}, "structural_tag": "{}",
    "structured_outputs": {"regex": "a"}, "suffix": "a", "temperature": 0.5, "thinking_token_budget": 5,
    "tool_choice": "none", "tools": [_TOOL], "top_k": 5, "top_logprobs": 1, "top_p": 0.5, "truncate_prompt_tokens": 2,
    "use_beam_search": True, "user": "a", "verbosity": "high", "vllm_xargs": {"a": 1}, "web_search_options": {"a": 1},
}  # fmt: skip

NEEDED: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
"""What goes with a parameter, where there is such a parameter."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(says: Any) -> AsyncIterator[FakeCore]:
    async with FakeCore(outputs=says("Fine.")) as core:
        yield core


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front_end(text: ModelText, core: FakeCore) -> AsyncIterator[FrontEnd]:
    # A template that takes all that templates can take.
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{{ documents }}{{ reasoning_effort }}"
    able = replace(
        text,
        chat_template=ChatTemplate({"default": template + "{{ enable_thinking }}"}, {}, "a test"),
        trust_request_template=True,
    )
    async with running(able, [core]) as front_end:
        yield front_end


async def _post(front_end: FrontEnd, path: str, fields: dict[str, Any]) -> Any:
    asks = {"messages": VALUES["messages"]} if path == CHAT_PATH else {"prompt": "a"}
    return await front_end.http.post(path, json={"model": MODEL, "seed": 1} | asks | fields)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("name", ROWS)
async def test_it_does_what_the_page_says(front_end: FrontEnd, core: FakeCore, name: str, path: str) -> None:
    verdict = ROWS[name][0 if path == CHAT_PATH else 1]
    value = VALUES[name][path] if name == "logprobs" else VALUES[name]
    needed = NEEDED.get(name, {}) if verdict == "supported" else {}
    core.requests.clear()
    response = await _post(front_end, path, {name: value} | needed)
    if verdict == "refused":
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == name
        assert (await _post(front_end, path, {name: None})).status_code == 200
        return
    assert response.status_code == 200, response.text
    if verdict == "supported":
        # It is looked at: a value of no possible kind is an error that names it.
        wrong = await _post(front_end, path, needed | {name: [[{}]]})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"].startswith(name)
        return
    assert verdict == ("ignored" if verdict == "ignored" else "—")
    await _post(front_end, path, {})
    with_it, without = (request.submit for request in core.requests)
    for submit in (with_it, without):
        submit.ClearField("handle")
        submit.ClearField("request_id")
    assert with_it == without


@pytest.mark.parametrize("name", sorted(name for name, verdicts in ROWS.items() if "refused" in verdicts))
async def test_what_asks_for_nothing_is_accepted(front_end: FrontEnd, name: str) -> None:
    for path, table, verdict in zip((CHAT_PATH, COMPLETION_PATH), (CHAT, COMPLETION), ROWS[name], strict=True):
        for value in table[name] if verdict == "refused" else ():
            assert (await _post(front_end, path, {name: value})).status_code == 200


async def test_the_page_is_complete() -> None:
    assert set(ROWS) == set(VALUES)
    for place, (official, schema, table) in enumerate(
        (
            (chat_params.CompletionCreateParamsStreaming, ChatRequest, CHAT),
            (completion_params.CompletionCreateParamsStreaming, CompletionRequest, COMPLETION),
        )
    ):
        known = set(schema.model_fields) | set(table) | set(official.__required_keys__ | official.__optional_keys__)
        missing = {name for name in known if ROWS.get(name, ("—", "—"))[place] == "—"}
        assert not missing
