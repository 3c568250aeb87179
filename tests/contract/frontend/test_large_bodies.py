"""Large requests are parsed, checked and rendered beside the event loop; small ones are not worth a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tercet_frontend.api import chat_job, endpoint
from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.tokenizing import ModelText

SMALL = [{"role": "user", "content": "Hi"}]
LARGE = [*SMALL, {"role": "assistant", "content": "Ho"}] * 750 + SMALL


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
async def test_where_the_work_is_done(
    text: ModelText, says: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    done: dict[str, set[threading.Thread]] = {}

    def note(module: Any, name: str) -> None:
        original = getattr(module, name)

        def noted(*arguments: Any) -> Any:
            done.setdefault(name, set()).add(threading.current_thread())
            return original(*arguments)

        monkeypatch.setattr(module, name, noted)

    note(endpoint, "parsed")
    note(endpoint, "validate")
    note(chat_job, "plan_chat")
    async with (
        FakeCore(outputs=says("Fine."), max_model_len=40_000) as core,
        running(text, [core]) as front_end,
    ):
        for messages, beside in ((SMALL, False), (LARGE, True)):
            done.clear()
            response = await front_end.http.post(path, json={"model": MODEL, "messages": messages, "max_tokens": 5})
            assert response.status_code == 200, response.text
            assert set(done) >= {"parsed", "plan_chat"}
            for name, threads in done.items():
                assert (threading.main_thread() not in threads) is beside, name
