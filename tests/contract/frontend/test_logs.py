"""What is logged of requests: one line each, whatever became of them, and never what was said."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tercet_frontend.access.connection import ConnectionLimits
from tercet_frontend.access.journal import Journal
from tercet_frontend.access.notes import Notes
from tercet_frontend.access.proxies import TrustedProxies
from tercet_frontend.edge import EdgeOptions
from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import EOS, MODEL, TIMEOUT, FrontEnd, running
from tests.contract.frontend.test_access import auth, keys_of
from tests.contract.frontend.wire import CHAT, body, request, wire
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SECRETS = ("Marmalade", "Strawberry", "sesame-key", "query-secret")


class Logs(list[dict[str, Any]]):
    """The lines of an access log; they are there once its front end has ended."""


@asynccontextmanager
async def logged(
    text: ModelText,
    core: FakeCore,
    directory: Path,
    logs: Logs,
    audit: Logs | None = None,
    *,
    proxies: str = "127.0.0.0/8",
    **options: Any,
) -> AsyncIterator[FrontEnd]:
    notes = Notes(Journal(directory / "access"), Journal(directory / "audit"))
    edge = EdgeOptions(notes=notes, proxies=TrustedProxies([proxies]))
    async with running(text, [core], edge=edge, **options) as front_end:
        yield front_end
    notes.close()
    logs.extend(map(orjson.loads, (directory / "access").read_bytes().splitlines()))
    if audit is not None:
        audit.extend(map(orjson.loads, (directory / "audit").read_bytes().splitlines()))
    written = (directory / "access").read_text() + (directory / "audit").read_text()
    assert not any(secret in written for secret in SECRETS)


def check(line: Mapping[str, Any], **expected: Any) -> None:
    assert {name: line[name] for name in expected} == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request(text: ModelText, tmp_path: Path, stream: bool) -> None:
    logs, audit = Logs(), Logs()
    keys = keys_of(tmp_path / "keys.json", **{"sesame-key": {"name": "alice", "tenant": "team"}})
    async with FakeCore() as core, logged(text, core, tmp_path, logs, audit, api_keys=keys) as front_end:
        headers = auth("sesame-key") | {
            "X-Request-Id": "mine-1",
            "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01",
            "X-Forwarded-For": "6.6.6.6, 192.0.2.7",
        }
        payload = body(messages=[{"role": "user", "content": "Marmalade"}], stream=stream, n=2)
        call = asyncio.create_task(front_end.http.post(f"{CHAT}?x=query-secret", json=payload, headers=headers))
        for number, each in enumerate(await core.next_requests(2)):
            ids = text.tokenizer.encode("Strawberry", add_special_tokens=False)
            each.send(*ids, EOS, finish=STOP, stop_id=EOS)
            output = (number + 1) * (len(ids) + 1)
        answer = await call
        assert answer.status_code == 200
        prompt = len(core.requests[0].prompt_ids)
    (line,) = logs
    assert 0 < line.pop("duration") < TIMEOUT
    assert line.pop("time")
    assert line == {
        "request_id": "mine-1", "trace_id": TRACE_ID, "method": "POST", "path": CHAT, "status": 200,
        "bytes": len(answer.content), "tenant": "team", "key": "alice", "client": "192.0.2.7", "model": MODEL,
        "served_model": MODEL, "prompt_tokens": prompt, "output_tokens": output, "finish_reasons": ["stop", "stop"],
        "error": None,
    }  # fmt: skip
    assert [(entry["event"], entry["outcome"], entry["key"]) for entry in audit] == [("request", "allowed", "alice")]


async def test_requests_that_are_refused(text: ModelText, tmp_path: Path) -> None:
    logs, audit = Logs(), Logs()
    keys = keys_of(tmp_path / "keys.json", one={"max_concurrent": 1, "models": ["smol"]})
    async with FakeCore() as core, logged(text, core, tmp_path, logs, audit, api_keys=keys) as front_end:
        http = front_end.http
        call = asyncio.create_task(http.post(CHAT, json=body(), headers=auth("one")))
        waiting = await core.next_request()
        await http.post(CHAT, json=body(), headers=auth("one"))
        await http.post(CHAT, json=body(), headers=auth("sesame-key"))
        await http.get("/v1/nowhere", headers=auth("plain"))
        waiting.reject(pb.ERROR_KIND_INTERNAL, "Marmalade", "")
        await call
        await http.post(CHAT, json=body(model="other"), headers=auth("one"))
        await http.post(CHAT, json=body(temperature=-1), headers=auth("one"))
        await http.get("/livez")  # a probe that succeeds is not of interest
        await http.get("/", headers=auth("x"))
    found = [(line["status"], line["error"], line["key"] and line["key"][:3]) for line in logs]
    plain = logs[2]["key"][:3]
    assert found == [
        (429, "rate_limit_exceeded", "one"),
        (401, "invalid_api_key", None),
        (404, None, plain),
        (500, "internal_error", "one"),
        (404, "model_not_found", "one"),
        (400, "invalid_request_error", "one"),
        (200, None, None),
    ]
    assert [entry["outcome"] for entry in audit] == ["refused"] * 3 + ["failed", "refused", "allowed"]


async def test_streams_that_do_not_end_well(text: ModelText, tmp_path: Path) -> None:
    logs = Logs()
    async with FakeCore() as core, logged(text, core, tmp_path, logs) as front_end:
        payload = body(stream=True)
        async with front_end.http.stream("POST", CHAT, json=payload) as response:
            waiting = await core.next_request()
            waiting.send(*[100] * 5)
            lines = response.aiter_lines()
            await anext(lines)
            waiting.fail(pb.ERROR_KIND_INTERNAL, "The logits are not finite.")
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        async with front_end.http.stream("POST", CHAT, json=payload) as response:
            waiting = await core.next_request()
            waiting.send(*[100] * 7)
            async for line in response.aiter_lines():  # not before the tokens have been heard
                if '"content":"' in line and '"content":""' not in line:
                    break
        await core.wait_for(lambda: waiting.aborted)
        call = asyncio.create_task(front_end.http.post(CHAT, json=body()))
        waiting = await core.next_request()
        call.cancel()
        await core.wait_for(lambda: waiting.aborted)
    failed, left, gone = logs
    check(failed, status=200, error="internal_error", output_tokens=5, finish_reasons=[])
    check(left, status=200, error="client_closed", output_tokens=7, finish_reasons=[])
    check(gone, status=499, error="client_closed", output_tokens=0, bytes=0)


@pytest.mark.parametrize(("proxies", "client"), [("127.0.0.1", "192.0.2.7"), ("10.0.0.0/8", "127.0.0.1")])
async def test_whose_word_counts(text: ModelText, tmp_path: Path, proxies: str, client: str) -> None:
    logs = Logs()
    async with FakeCore() as core, logged(text, core, tmp_path, logs, proxies=proxies) as front_end:
        await front_end.http.get("/v1/models", headers={"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"})
    assert [line["client"] for line in logs] == [client]


async def test_what_was_no_request(text: ModelText, tmp_path: Path) -> None:
    logs = Logs()
    limits = ConnectionLimits(receive_timeout=0.2)
    options: dict[str, Any] = {"limits": limits, "receive_timeout": 0.2}
    async with FakeCore() as core, logged(text, core, tmp_path, logs, **options) as front_end:
        for sent in (b"\0\0", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1_000, b"GET", request()[:-2]):
            async with wire(front_end.url) as client:
                await client.send(sent)
                await client.answer()
    assert [(line["status"], line["error"]) for line in logs] == [
        (400, "invalid_request_error"),
        (431, "request_head_too_large"),
        (408, "request_timeout"),
        (408, "request_timeout"),
    ]
    assert {line["client"] for line in logs} == {"127.0.0.1"}
