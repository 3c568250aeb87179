"""A core that is lost in the middle of an answer: the client sees that of an undisturbed run, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import orjson
import pytest

from tests.contract.frontend.conftest import EOS, MODEL, running
from tests.fakes.core import LENGTH, STOP, FakeCore, scored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.tokenizing import ModelText
    from tests.contract.frontend.conftest import FrontEnd

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
QUICK: dict[str, Any] = {"backoff_first": 0.01, "backoff_limit": 0.02}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def _play(core: FakeCore, ids: Sequence[int], cuts: Sequence[int], count: int = 1) -> None:
    """Yields ``ids`` to each of ``count`` requests, and loses its front end after the numbers of tokens in ``cuts``."""
    pending = list(cuts)
    while True:
        requests = await core.next_requests(count)
        begin = len(requests[0].resumed_ids)
        assert requests[0].resumed_ids == list(ids[:begin])
        end = pending.pop(0) if pending else len(ids)
        for request in requests:
            _send(request, ids, begin, end)
        if end == len(ids):
            return
        requests[0].connection.end(grpc.StatusCode.UNAVAILABLE)


def _send(request: Any, ids: Sequence[int], begin: int, end: int) -> None:
    """One frame for each token, as an engine does."""
    sampling = request.submit.sampling
    if not begin and sampling.HasField("prompt_logprobs"):
        request.send_prompt_scores(1, len(request.prompt_ids) - 1)
    for position in range(begin, end):
        token = ids[position]
        last = position + 1 == len(ids)
        request.send(
            token,
            starts=5 if position == begin else None,
            cached=9 if begin else 5,  # a later attempt finds what the first one has computed
            scores=[scored(position, token, sampling.logprobs)] if sampling.HasField("logprobs") else None,
            finish=None if not last else STOP if token == EOS else LENGTH,
            stop_id=EOS if last and token == EOS else -1,
        )


async def _answer(
    front_end: FrontEnd, core: FakeCore, ids: Sequence[int], cuts: Sequence[int], body: dict[str, Any]
) -> Any:
    """Returns the choices and the usage of an answer; of a stream, joined."""
    playing = asyncio.create_task(_play(core, ids, cuts, body.get("n", 1)))
    try:
        response = await front_end.http.post(CHAT, json={"model": MODEL, "messages": MESSAGES} | body)
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    assert response.status_code == 200
    if not body.get("stream"):
        whole = response.json()
        return whole["choices"], whole["usage"]
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    text: dict[int, str] = {}
    ends: dict[int, str] = {}
    scores: dict[int, list[Any]] = {}
    usage = None
    for chunk in map(orjson.loads, events):
        assert "error" not in chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            text[index] = text.get(index, "") + (choice["delta"].get("content") or "")
            scores.setdefault(index, []).extend((choice.get("logprobs") or {}).get("content") or [])
            if choice["finish_reason"] is not None:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    return text, ends, scores, usage


def _stream(**body: Any) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} | body


@pytest.mark.parametrize(
    "body",
    [
        {"stop": ["END OF"]},
        _stream(stop=["END OF"], logprobs=True, top_logprobs=2),
        _stream(n=2),
        {"tools": [WEATHER]},
    ],
)
async def test_the_answer_is_that_of_an_undisturbed_run(text: ModelText, body: dict[str, Any]) -> None:
    said = "Grüße 👋🏽.\nThe END OF it."
    if "tools" in body:
        said = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
    ids = [*text.tokenizer.encode(said, add_special_tokens=False), EOS]
    stopped_at = len(ids)
    if "stop" in body:
        while "END OF" in text.tokenizer.decode(ids[: stopped_at - 1]):
            stopped_at -= 1
    async with FakeCore() as core, running(text, [core], max_attempts=9, **QUICK) as front_end:
        expected = await _answer(front_end, core, ids, [], body)
        for cut in range(stopped_at):
            assert _same(await _answer(front_end, core, ids, [cut], body), expected), cut
        assert _same(await _answer(front_end, core, ids, [1, 1, 3, 4], body), expected)
        assert front_end.cores.migrations.failed == 0


def _same(answer: Any, expected: Any) -> bool:
    """Whether two answers are equal, but for the ids of tool calls, which are drawn."""
    for choices, *_ in (answer, expected):
        for choice in choices if isinstance(choices, list) else ():
            for call in choice["message"].get("tool_calls") or ():
                call["id"] = ""
    return bool(answer == expected)


async def test_the_stop_string_is_found_while_no_core_is_there(text: ModelText) -> None:
    """What was held back in the middle of a stop string is given out when the stream goes on, or ends."""
    ids = text.tokenizer.encode("This is the END", add_special_tokens=False)
    rest = text.tokenizer.encode(" of it", add_special_tokens=False)
    async with FakeCore() as core, running(text, [core], **QUICK) as front_end:
        answering = asyncio.create_task(
            front_end.http.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "stop": ["END OF"]})
        )
        request = await core.next_request()
        request.send(*ids)
        request.connection.end(grpc.StatusCode.UNAVAILABLE)
        again = await core.next_request()
        assert again.resumed_ids == ids  # those held back too
        again.send(*rest, finish=LENGTH)
        (choice,) = (await answering).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("This is the END of it", "length")


async def test_a_request_that_kills_cores_says_so(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], max_attempts=2, **QUICK) as front_end:
        answering = asyncio.create_task(front_end.http.post(CHAT, json={"model": MODEL, "messages": MESSAGES}))
        for _ in range(2):
            (await core.next_request()).connection.end(grpc.StatusCode.UNAVAILABLE)
        response = await answering
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "2 cores were lost" in response.json()["error"]["message"]
