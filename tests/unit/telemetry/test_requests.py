"""What the front end makes of requests: outcomes, times, tokens, spans and log lines. Through the real `Edge`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tercet_frontend.access.exchange import Exchange, exchange_of
from tercet_frontend.access.keys import ApiKey
from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.cores.interface import Finished, FinishReason, GenerationRequest, Tokens
from tercet_frontend.edge import Edge, EdgeOptions
from tercet_frontend.telemetry.live import LiveStats
from tercet_frontend.telemetry.metrics import Tenants
from tercet_frontend.telemetry.requests import GAP_EVERY, RequestTelemetry
from tercet_shared.errors import OverloadedError, UnavailableError
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.telemetry.instruments import Meter
from tercet_shared.telemetry.logs import JsonLines
from tercet_shared.telemetry.tracing import Tracing, parse

CHAT = "/v1/chat/completions"
TRACE = "ab" * 16
TRACEPARENT = f"00-{TRACE}-{'cd' * 8}-01"

Work = Callable[[Exchange, dict[str, Any]], Awaitable[None]]


class System:
    """A front end whose application is one coroutine of the test."""

    def __init__(self, ratio: float = 0.0) -> None:
        self.meter = Meter()
        self.exporter = InMemorySpanExporter()
        self.live = LiveStats(Occupancy())
        self.telemetry = RequestTelemetry(
            self.meter, Tracing(SimpleSpanProcessor(self.exporter).on_end, ratio=ratio), self.live
        )

    async def ask(
        self, work: Work, *, path: str = CHAT, status: int = 200, complete: bool = True, traceparent: str = ""
    ) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            exchange = exchange_of(scope)
            scope["route"] = SimpleNamespace(path=path)
            await work(exchange, scope)
            if status:
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b"x", "more_body": not complete})

        headers = [(b"traceparent", traceparent.encode())] if traceparent else []
        scope = {"type": "http", "method": "POST", "path": path, "scheme": "http", "headers": headers, "client": None}

        async def nothing(_message: Any) -> None:
            pass

        edge = Edge(app, EdgeOptions(watcher=self.telemetry))
        await asyncio.create_task(edge(scope, nothing, nothing))  # type: ignore[arg-type]  # each request has a task

    def numbers(self, name: str) -> dict[tuple[str, ...], float]:
        (reading,) = [found for found in self.meter.collect() if found.description.name == name]
        if reading.distributions:
            return {labels: one.count for labels, one in reading.distributions}
        return dict(reading.numbers)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()


async def answer(exchange: Exchange, scope: dict[str, Any]) -> None:
    exchange.model, exchange.target = "alias", "model"
    exchange.watch.streaming()
    exchange.watch.first_token()
    exchange.watch.first_token()
    exchange.used(10, 5, ["stop"])


def failing(code: str) -> Work:
    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        exchange.error = code

    return work


async def test_an_answer_is_counted_once() -> None:
    system = System()
    await system.ask(answer)
    model = ("chat", "tercet", "alias", "model")
    assert system.numbers("gen_ai.server.request.duration") == {(*model, ""): 1}
    assert system.numbers("gen_ai.server.time_to_first_token") == {model: 1}
    assert system.numbers("gen_ai.server.time_per_output_token") == {model: 1}
    assert system.numbers("tercet.frontend.tokens") == {("input", "alias", ""): 10, ("output", "alias", ""): 5}
    assert system.numbers("tercet.frontend.requests") == {("ok", ""): 1}
    assert system.numbers("http.server.request.duration") == {("POST", CHAT, "200", "http"): 1}
    assert system.numbers("tercet.frontend.streams") == {(): 0}
    assert system.numbers("http.server.active_requests") == {(): 0}
    assert system.live.snapshot().time_to_first_token.count == 1


@pytest.mark.parametrize(
    ("code", "status", "complete", "outcome"),
    [
        ("rate_limit_exceeded", 429, True, "rejected"),
        ("", 404, True, "rejected"),
        ("internal_error", 200, True, "error"),
        ("", 200, False, "aborted"),
        ("", 0, False, "aborted"),
        ("request_cancelled", 499, True, "aborted"),
    ],
)
async def test_how_requests_end(code: str, status: int, complete: bool, outcome: str) -> None:
    system = System()
    await system.ask(failing(code), status=status, complete=complete)
    assert system.numbers("tercet.frontend.requests") == {(outcome, ""): 1}
    rejected = {(code or str(status),): 1} if outcome == "rejected" else {}
    assert system.numbers("tercet.frontend.rejections") == rejected
    aborted = {("cancelled" if code else "client_closed",): 1} if outcome == "aborted" else {}
    assert system.numbers("tercet.frontend.aborts") == aborted
    assert system.numbers("gen_ai.server.time_to_first_token") == {}, "there was no token"
    assert system.numbers("gen_ai.server.time_per_output_token") == {}
    assert system.numbers("http.server.active_requests") == {(): 0}
    ((*_, error_type),) = system.numbers("gen_ai.server.request.duration")
    assert error_type


async def test_an_application_that_fails_leaves_no_gauge_behind() -> None:
    system = System()

    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        exchange.watch.streaming()
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError):
        await system.ask(work)
    assert system.numbers("tercet.frontend.streams") == {(): 0}
    assert system.numbers("http.server.active_requests") == {(): 0}


async def test_labels_are_not_what_clients_invent() -> None:
    system = System()

    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        scope["method"] = "BREW"
        scope["route"] = None

    await system.ask(work, path="/x/../../y", status=404)
    assert system.numbers("http.server.request.duration") == {("_OTHER", "", "404", "http"): 1}
    assert system.numbers("tercet.frontend.requests") == {}, "it is no part of the API"


async def test_tenants_have_numbers_of_their_own_up_to_a_bound() -> None:
    system = System()
    for tenant in ("ada", "bob"):

        async def work(exchange: Exchange, scope: dict[str, Any], tenant: str = tenant) -> None:
            exchange.key = ApiKey(hash="sha256:" + "0" * 64, name=tenant, tenant=tenant)
            await answer(exchange, scope)

        await system.ask(work)
    assert system.numbers("tercet.frontend.requests") == {("ok", "ada"): 1, ("ok", "bob"): 1}
    tenants = Tenants(2)
    assert [tenants.label(name) for name in ("a", "b", "c", "a", "")] == ["a", "b", "other", "a", ""]


# ------------------------------------------------------------------------------------------------------------ spans


class Scripted:
    """A generation that says what it is told."""

    def __init__(self, *batches: Tokens | Exception) -> None:
        self.attempt = 0
        self.journey: Any = None
        self._batches = list(batches)

    async def next(self) -> Tokens:
        batch = self._batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def finish(self, output_tokens: int) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass


def request() -> GenerationRequest:
    params = SamplingParams(max_tokens=7, temperature=0.5)
    return GenerationRequest(
        request_id="chatcmpl-1", model="model", prompt_ids=np.arange(3, dtype=np.int32), params=params
    )


def by_name(spans: tuple[ReadableSpan, ...]) -> dict[str, Any]:
    return {span.name: span for span in spans}


async def test_a_traced_request_has_a_span_and_its_choices_below() -> None:
    system = System()
    generation = Scripted(
        Tokens([1], None), Tokens([2, 3], None), Tokens([4], Finished(FinishReason.STOP, 4, cached_tokens=0))
    )
    sent: list[GenerationRequest] = []

    def submit(asked: GenerationRequest) -> Any:
        sent.append(asked)
        return generation

    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        choice = exchange.watch.submit(submit, request())
        await choice.next()
        generation.attempt, generation.journey = 1, SimpleNamespace(reason="The core is gone.")
        await choice.next()
        await choice.next()
        await answer(exchange, scope)

    await system.ask(work, traceparent=TRACEPARENT)
    spans = by_name(system.spans)
    top, choice = spans["chat alias"], spans["tercet.choice"]
    assert (top.context.trace_id, top.parent.span_id) == (int(TRACE, 16), int("cd" * 8, 16))
    assert choice.parent.span_id == top.context.span_id
    context = parse(sent[0].traceparent)
    assert context is not None
    assert context.span_id == choice.context.span_id
    attributes = dict(top.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.response.model"]) == ("alias", "model")
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (10, 5)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["http.response.status_code"] == 200
    assert "error.type" not in attributes
    assert choice.attributes["gen_ai.request.max_tokens"] == 7
    assert (choice.attributes["tercet.end"], choice.attributes["gen_ai.usage.output_tokens"]) == ("stop", 4)
    assert [event.name for event in choice.events] == ["tercet.first_token", "tercet.migrated"]
    assert dict(choice.events[1].attributes) == {
        "tercet.attempt": 1,
        "tercet.reason": "The core is gone.",
        "tercet.resumed_tokens": 1,
    }


async def test_what_is_not_traced_is_handed_on_as_it_is() -> None:
    system = System(ratio=1.0)
    generation = Scripted()
    seen: list[Any] = []

    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        asked = request()
        seen.extend([exchange.watch.submit(lambda sent: seen.append(sent is asked) or generation, asked)])  # type: ignore[func-returns-value]

    await system.ask(work, traceparent=TRACEPARENT[:-1] + "0")
    assert seen == [True, generation]
    assert system.spans == ()


@pytest.mark.parametrize(
    ("error", "code"),
    [(OverloadedError("full"), "rate_limit_exceeded"), (UnavailableError("x"), "service_unavailable")],
)
async def test_a_choice_that_fails_says_why(error: Exception, code: str) -> None:
    system = System()

    async def late(exchange: Exchange, scope: dict[str, Any]) -> None:
        choice = exchange.watch.submit(lambda _: Scripted(Tokens([1], None), error), request())
        await choice.next()
        with pytest.raises(type(error)):
            await choice.next()

    def refuse(_: GenerationRequest) -> Any:
        raise error

    async def at_once(exchange: Exchange, scope: dict[str, Any]) -> None:
        with pytest.raises(type(error)):
            exchange.watch.submit(refuse, request())

    await system.ask(late, traceparent=TRACEPARENT)
    await system.ask(at_once, traceparent=TRACEPARENT)
    found = [span for span in system.spans if span.name == "tercet.choice"]
    assert [dict(span.attributes or {})["error.type"] for span in found] == [code, code]


async def test_gaps_between_tokens_are_measured_for_some_choices() -> None:
    system = System()

    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        for _ in range(2 * GAP_EVERY):
            choice = exchange.watch.submit(lambda _: Scripted(Tokens([1], None), Tokens([2], None)), request())
            await choice.next()
            await choice.next()

    await system.ask(work)
    assert system.numbers("tercet.frontend.token_gap") == {(): 2}
    assert system.live.snapshot().token_gap.count == 2


async def test_probes_and_pages_are_not_traced() -> None:
    system = System(ratio=1.0)
    await system.ask(answer, path="/livez")
    assert system.spans == ()
    await system.ask(answer)
    assert len(system.spans) == 1


async def test_lines_of_the_log_carry_the_trace_of_their_request() -> None:
    lines: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    logger = logging.getLogger("tercet.test_requests")
    handler = Kept()
    handler.setFormatter(JsonLines("tercet-frontend"))
    logger.addHandler(handler)

    async def work(exchange: Exchange, scope: dict[str, Any]) -> None:
        logger.warning("something of note")

    try:
        await System().ask(work, traceparent=TRACEPARENT)
        await System().ask(work)
    finally:
        logger.removeHandler(handler)
    assert lines[0]["trace_id"] == TRACE
    assert lines[0]["span_id"] != "cd" * 8, "the span of the request itself"
    assert "trace_id" not in lines[1]
