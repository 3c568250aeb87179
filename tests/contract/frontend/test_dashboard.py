"""The dashboard over HTTP: its page, its snapshots and its streams. What the page shows is in tests/e2e."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tercet_frontend.access.key_file import KeyRing
from tercet_frontend.access.keys import ApiKey
from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.auth import ApiKeys
from tercet_frontend.pages import chat_page_files, dashboard_files
from tercet_frontend.server import serve
from tercet_frontend.telemetry.live import LiveStats
from tercet_shared.config import FrontendSettings, ServeSettings, parse
from tercet_shared.lifecycle.plan import plan_serve
from tests.contract.frontend.conftest import MODEL, TIMEOUT, running
from tests.contract.frontend.dashboards import Shown
from tests.contract.frontend.wire import CHAT, body
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText
    from tests.contract.frontend.conftest import FrontEnd

FILES = dashboard_files()
EVENTS = "/dashboard/events"
SNAPSHOT = "/dashboard/snapshot"
ROUTES = (EVENTS, SNAPSHOT)


def shows(text: ModelText, core: FakeCore, shown: Shown, **more: Any) -> AbstractAsyncContextManager[FrontEnd]:
    return running(text, [core], dashboard=shown, **more)


class Stream:
    """A stream of snapshots that is open."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> dict[str, Any] | None:
        """Returns the next snapshot, or None at the end."""
        async with asyncio.timeout(TIMEOUT):
            async for line in self._lines:
                if line:
                    assert line.startswith("data: ")
                    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    return found
        return None

    async def rest(self) -> None:
        """Returns at the end of the stream."""
        while await self.next() is not None:
            pass


@asynccontextmanager
async def stream(http: httpx.AsyncClient) -> AsyncIterator[Stream]:
    async with http.stream("GET", EVENTS) as response:
        yield Stream(response)


async def until(condition: Any) -> None:
    """Lets the loop run until ``condition`` holds."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.001)


# ---------------------------------------------------------------------------------------------------- snapshots


async def test_a_snapshot_has_the_front_end_and_each_core(text: ModelText) -> None:
    async with FakeCore(core_id="first", model_name="smol-model") as core, shows(text, core, Shown()) as front_end:
        connection = await core.connected()
        core.stats(
            running=3, waiting=2, free_blocks=250, num_blocks=1000, prompt_tokens=400, cached_tokens=100,
            output_tokens=7, preemptions=5, step_ms=12.5,
        )  # fmt: skip
        await until(lambda: front_end.cores.streams[0].stats.preemptions)
        response = await front_end.http.get(SNAPSHOT)
        assert response.headers["content-type"] == "application/json"
        assert response.headers["cache-control"] == "no-store"
        snapshot = response.json()
        assert snapshot.pop("time") > 1_700_000_000
        assert snapshot == {
            "frontend": "a front end",
            "not_ready": None,
            "running": 0,
            "waiting": 0,
            "requests_per_s": 0.0,
            "failed_per_s": 0.0,
            "output_tokens_per_s": 0.0,
            "input_tokens_per_s": 0.0,
            "time_to_first_token": {"p50": 0.0, "p90": 0.0, "p99": 0.0, "count": 0},
            "token_gap": {"p50": 0.0, "p90": 0.0, "p99": 0.0, "count": 0},
            "cores": [
                {
                    "core_id": "first",
                    "address": core.address,
                    "model": "smol-model",
                    "state": "ready",
                    "running": 3,
                    "waiting": 2,
                    "own": 0,
                    "kv_used": 0.75,
                    "cached": 0.25,
                    "step_ms": 12.5,
                    "output_tokens_per_s": 0.0,
                    "input_tokens_per_s": 0.0,
                    "preemptions": 5,
                }
            ],
        }
        assert connection.frames  # nothing was asked of the core for it


async def test_a_stream_shows_requests_as_they_come_and_go(text: ModelText) -> None:
    occupancy, shown = Occupancy(), Shown()
    edge = shown.watch(occupancy)
    async with FakeCore() as core, shows(text, core, shown, occupancy=occupancy, edge=edge) as front_end:
        async with stream(front_end.http) as seen:
            assert seen.response.headers["content-type"].startswith("text/event-stream")

            async def see(**wanted: int) -> dict[str, Any]:
                while True:
                    snapshot = await seen.next()
                    assert snapshot is not None
                    if wanted.items() <= snapshot.items():
                        return snapshot

            assert (await see(running=0, waiting=0))["time_to_first_token"]["count"] == 0
            asking = asyncio.create_task(front_end.http.post(CHAT, json=body()))
            request = await core.next_request()
            while not (await see(waiting=1, running=0))["cores"][0]["own"]:
                pass  # it waits already while its body comes
            request.send(5, 6)
            assert (await see(waiting=0, running=1))["time_to_first_token"]["count"] == 1
            core.stats(running=1, output_tokens=500, prompt_tokens=40, num_blocks=10, free_blocks=9)
            while not (snapshot := await see(running=1))["output_tokens_per_s"]:
                pass
            assert snapshot["cores"][0]["output_tokens_per_s"] == snapshot["output_tokens_per_s"]
            request.send(2, finish=1, stop_id=2)
            assert (await asking).status_code == 200
            snapshot = await see(running=0, waiting=0)
            assert snapshot["requests_per_s"] > 0
            assert snapshot["failed_per_s"] == 0


async def test_it_says_why_no_request_is_served(text: ModelText) -> None:
    async with FakeCore() as core, shows(text, core, Shown(interval=0.01), ready=False) as front_end:
        async with stream(front_end.http) as seen:
            snapshot = await seen.next()
            assert snapshot is not None
            assert "tokenizer" in snapshot["not_ready"]


async def test_a_snapshot_is_made_once_for_all_who_look(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    original = LiveStats.snapshot

    def counted(self: LiveStats) -> Any:
        nonlocal made
        made += 1
        return original(self)

    monkeypatch.setattr(LiveStats, "snapshot", counted)
    async with FakeCore() as core, shows(text, core, Shown(interval=3_600)) as front_end:
        first = (await front_end.http.get(SNAPSHOT)).content
        async with stream(front_end.http) as one, stream(front_end.http) as two:
            assert await one.next() == await two.next() == json.loads(first)
        assert (await front_end.http.get(SNAPSHOT)).content == first
    assert made == 1


# ---------------------------------------------------------------------------------------------------- viewers


async def test_viewers_are_bounded_and_leave_their_place(text: ModelText) -> None:
    shown = Shown(max_viewers=2)
    async with FakeCore() as core, shows(text, core, shown) as front_end:
        http = front_end.http
        async with stream(http) as kept:
            await kept.next()
            async with stream(http) as other:
                await other.next()
                assert shown.viewers == 2
                refused = await http.get(EVENTS)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert "2 dashboards are open" in refused.json()["error"]["message"]
                assert (await http.get(SNAPSHOT)).status_code == 200
            await until(lambda: shown.viewers == 1)
            async with stream(http) as another:
                assert another.response.status_code == 200
                await another.next()
            await kept.next()
        await until(lambda: shown.viewers == 0)
        assert front_end.admission.occupancy.running == 0


async def test_closing_ends_streams_at_once_and_lets_none_begin(text: ModelText) -> None:
    shown = Shown(interval=3_600)
    async with FakeCore() as core, shows(text, core, shown) as front_end:
        async with stream(front_end.http) as one, stream(front_end.http) as two:
            await one.next()
            await two.next()
            assert shown.dashboard is not None
            shown.dashboard.close()
            await one.rest()
            await two.rest()
        assert (await front_end.http.get(EVENTS)).status_code == 503
        assert (await front_end.http.get(SNAPSHOT)).status_code == 200


class _Reports:
    """Takes the reports of a front end; the first "ready" says where it listens."""

    def __init__(self) -> None:
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def progress(self, *_: object) -> None: ...

    def fatal(self, *_: object) -> None: ...

    def ready(self, **detail: object) -> None:
        self.url.set_result(str(detail["url"]))


async def test_watching_does_not_hold_up_the_end_of_a_front_end(model_path: Path, tmp_path: Path) -> None:
    flags = ["--port=0", f"--core=unix:{tmp_path}/none", "--grace=3600", str(model_path)]
    reports, stop = _Reports(), asyncio.Event()
    async with httpx.AsyncClient(timeout=TIMEOUT) as http:
        serving = asyncio.create_task(serve(parse(FrontendSettings, flags), reports, stop))  # type: ignore[arg-type]
        http.base_url = httpx.URL(await asyncio.wait_for(reports.url, TIMEOUT))
        async with stream(http) as seen:
            first = await seen.next()
            assert first is not None
            assert re.fullmatch(r".+-\d+-[0-9a-f]{8}", first["frontend"])
            stop.set()
            await seen.rest()
        await asyncio.wait_for(serving, TIMEOUT)


# ---------------------------------------------------------------------------------------------------- who may look


async def test_the_page_needs_no_key_and_its_data_do(text: ModelText) -> None:
    async with FakeCore() as core, shows(text, core, Shown(), keys=["secret"]) as front_end:
        async with httpx.AsyncClient(base_url=front_end.url, timeout=TIMEOUT) as stranger:
            for path in FILES:
                assert (await stranger.get(path)).status_code == 200
            for path in ROUTES:
                assert (await stranger.get(path)).status_code == 401, path
        assert (await front_end.http.get(SNAPSHOT)).status_code == 200
        async with stream(front_end.http) as seen:
            assert await seen.next() is not None


async def test_a_key_for_some_models_does_not_see_the_others(text: ModelText) -> None:
    key = ApiKey(name="narrow", hash=f"sha256:{hashlib.sha256(b'narrow').hexdigest()}", models=(MODEL,))
    keys = ApiKeys(["wide"], file=KeyRing([key]))
    async with FakeCore() as core, shows(text, core, Shown(), api_keys=keys) as front_end:
        for path in ROUTES:
            response = await front_end.http.get(path, headers={"Authorization": "Bearer narrow"})
            assert response.status_code == 404
            assert core.address not in response.text


# ---------------------------------------------------------------------------------------------------- the page


async def test_the_page_and_all_that_it_loads(text: ModelText) -> None:
    async with FakeCore() as core, shows(text, core, Shown()) as front_end:
        page = await front_end.http.get("/dashboard")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "unsafe" not in page.headers["content-security-policy"]
        queue = sorted(set(re.findall(r'(?:src|href)="(assets/[^"]+)"', page.text)))
        loaded = set(queue)
        while queue:
            found = await front_end.http.get(f"/{queue.pop()}")
            assert found.status_code == 200, found.url
            for name in re.findall(r"from '\./([\w.]+)'", found.text):
                if f"assets/{name}" not in loaded:
                    loaded.add(f"assets/{name}")
                    queue.append(f"assets/{name}")
        assert {f"/{path}" for path in loaded} == set(FILES) - {"/dashboard"}
        assert (await front_end.http.get("/")).status_code == 200  # the chat page is beside it
        paths = (await front_end.http.get("/openapi.json")).json()["paths"]
        assert not any(path.startswith("/dashboard") for path in paths)


def test_no_file_names_another_host_or_holds_inline_code() -> None:
    page = FILES["/dashboard"].content.decode()
    assert re.search(r"<script(?! (?:type=\"module\" )?src=\"assets/)", page) is None
    assert re.search(r"<style|\sstyle=|\son\w+=", page) is None
    for path, file in FILES.items():
        names = set(re.findall(r"https?://([\w.-]+)", file.content.decode()))
        assert names <= {"www.w3.org"}, path  # the name of SVG's namespace; nothing is loaded from there


async def test_switched_off_there_is_nothing(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        for path in {"/dashboard", *ROUTES, *set(FILES) - set(chat_page_files())}:
            assert (await front_end.http.get(path)).status_code == 404, path
        assert (await front_end.http.get("/")).status_code == 200


@pytest.mark.parametrize(("flags", "status"), [([], 200), (["--no-dashboard", "--no-chat-page"], 404)])
async def test_the_setting(model_path: Path, tmp_path: Path, flags: list[str], status: int) -> None:
    settings = parse(FrontendSettings, ["--port=0", f"--core=unix:{tmp_path}/none", *flags, str(model_path)])
    reports, stop = _Reports(), asyncio.Event()
    async with asyncio.TaskGroup() as group, httpx.AsyncClient(timeout=TIMEOUT) as http:
        group.create_task(serve(settings, reports, stop))  # type: ignore[arg-type]
        url = await asyncio.wait_for(reports.url, TIMEOUT)
        for path in ("/dashboard", SNAPSHOT, "/assets/chart.js", "/assets/base.css"):
            assert (await http.get(url + path)).status_code == status, path
        stop.set()


def test_the_setting_reaches_the_front_end(tmp_path: Path) -> None:
    for flags, expected in (([], []), (["--no-dashboard"], ["--no-dashboard"])):
        front_end = plan_serve(parse(ServeSettings, [*flags, "model"]), tmp_path, {}).children[0]
        assert [argument for argument in front_end.argv if "dashboard" in argument] == expected
