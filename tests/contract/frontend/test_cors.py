"""Calls from pages of other origins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tercet_frontend.edge import EdgeOptions
from tests.contract.frontend.conftest import EOS, running
from tests.contract.frontend.wire import CHAT, body
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    "Authorization": "",
}


@pytest.mark.parametrize("origins", [[PAGE, "http://other.example:8080"], ["*"]])
async def test_a_page_that_may_call(text: ModelText, says: Any, origins: list[str]) -> None:
    edge = EdgeOptions(origins=origins)
    allowed = "*" if origins == ["*"] else PAGE
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], keys=["secret"], edge=edge) as front_end:
        http = front_end.http
        asked = await http.options(CHAT, headers=PREFLIGHT | {"Origin": PAGE})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, allowed)
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        answer = await http.post(CHAT, json=body(), headers={"Origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, allowed)
        exposed = answer.headers["access-control-expose-headers"].lower()
        assert all(name in exposed for name in ("x-request-id", "retry-after", "x-ratelimit-remaining-tokens"))
        assert "access-control-allow-credentials" not in answer.headers
        # Errors can be read as well, whoever makes them.
        for headers, path, status in (
            ({"Authorization": "Bearer wrong"}, CHAT, 401),
            ({}, "/v1/nowhere", 404),
            ({"Content-Type": "text/plain"}, CHAT, 400),
        ):
            refused = await http.post(path, content=b"x", headers={"Origin": PAGE} | headers)
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, allowed)
            assert refused.headers["x-request-id"]


async def test_pages_that_may_not_call(text: ModelText, says: Any) -> None:
    for edge in (EdgeOptions(origins=["https://other.example"]), EdgeOptions()):
        async with FakeCore(outputs=says("Yes")) as core, running(text, [core], edge=edge) as front_end:
            asked = await front_end.http.options(CHAT, headers=PREFLIGHT | {"Origin": PAGE})
            assert asked.status_code in (400, 405)
            assert "access-control-allow-origin" not in asked.headers
            answer = await front_end.http.post(CHAT, json=body(), headers={"Origin": PAGE})
            assert "access-control-allow-origin" not in answer.headers


async def test_streams_are_not_held_back(text: ModelText) -> None:
    edge = EdgeOptions(origins=[PAGE])
    async with FakeCore() as core, running(text, [core], edge=edge) as front_end:
        payload = body(stream=True)
        async with front_end.http.stream("POST", CHAT, json=payload, headers={"Origin": PAGE}) as response:
            assert response.headers["access-control-allow-origin"] == PAGE
            waiting = await core.next_request()
            lines = response.aiter_lines()
            for word in ("Paris", " is", " nice"):  # each is read before the next is sent
                waiting.send(*text.tokenizer.encode(word))
                said = ""
                while said != word:
                    line = await anext(lines)
                    if line:
                        said += orjson.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
            waiting.send(EOS, finish=STOP, stop_id=EOS)
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_an_error_that_nobody_expected(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = EdgeOptions(origins=[PAGE])
    async with FakeCore() as core, running(text, [core], edge=edge) as front_end:

        def fail() -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(front_end.admission, "admit", fail)
        answers = await asyncio.gather(
            *(front_end.http.post(path, json=body(), headers={"Origin": PAGE}) for path in (CHAT, "/v1/messages"))
        )
    assert {answer.status_code for answer in answers} == {500}
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {PAGE}
    assert all(answer.headers["x-request-id"] and "secret" not in answer.text for answer in answers)
    assert answers[0].json()["error"]["code"] == "internal_error"
    assert answers[1].json()["error"]["type"] == "api_error"
