"""API keys and request ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_keys(text: ModelText, says: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], keys=["first", "second"]) as front_end:
        for key in ("first", "second"):
            await front_end.openai.with_options(api_key=key).chat.completions.create(model=MODEL, messages=MESSAGES)
        for wrong in ("third", "firs", "firstt", "FIRST"):
            with pytest.raises(openai.AuthenticationError) as caught:
                await front_end.openai.with_options(api_key=wrong).models.list()
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/chat/completions", "/openapi.json", "/docs", "/nowhere", "/livez/x"):
            refused = await front_end.http.get(path, headers={"Authorization": ""})
            assert refused.status_code == 401, path
            assert refused.headers["x-request-id"]
        for path in ("/livez", "/readyz", "/health"):
            assert (await front_end.http.get(path, headers={"Authorization": ""})).status_code == 200
    tenants = [request.submit.tenant for request in core.requests]
    assert len(set(tenants)) == 2
    assert not {"first", "second", ""} & set(tenants)
    assert [request.submit.cache_salt for request in core.requests] == tenants


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-123_X.y:z/1", True), ("a" * 129, False), ("with space", False), ("", False)]
)
async def test_request_id(text: ModelText, says: Any, given: str, echoed: bool) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        for path, body in (("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES}), ("/nowhere", {})):
            response = await front_end.http.post(path, json=body, headers={"X-Request-Id": given})
            assert (response.headers["x-request-id"] == given) is echoed
            assert len(response.headers["x-request-id"]) <= 128
