"""The dashboard in a real browser, before real front ends."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tercet_frontend.access.occupancy import Occupancy
from tercet_frontend.tokenizing import ModelText
from tercet_shared.checkpoint import Checkpoint
from tests.contract.frontend.conftest import running
from tests.contract.frontend.dashboards import Shown
from tests.contract.frontend.wire import CHAT, body
from tests.e2e.browser import Visit, browser, needs_chromium, playwright_api
from tests.e2e.conftest import Serving
from tests.fakes.core import STOP, FakeCore
from tests.fakes.ports import free_port

pytestmark = needs_chromium

PAGE = "/dashboard"
NUMBER = re.compile(r"^[1-9][\d.,]*k?$")


@pytest.fixture(scope="module")
def text(smollm2: Path) -> ModelText:
    return ModelText.read(Checkpoint.open(str(smollm2)))


@pytest.fixture
async def visit() -> AsyncIterator[Visit]:
    async with browser() as visit:
        yield visit


def card(page: Any, title: str) -> Any:
    """Returns the card of that title."""
    return page.locator(".card", has=page.get_by_role("heading", name=re.compile(f"^{title}")))


def figure(page: Any, title: str, label: str) -> Any:
    """Returns what a card says of one of its series."""
    return card(page, title).locator("dl > div", has=page.get_by_text(label, exact=True)).locator("dd")


async def live(page: Any) -> None:
    await playwright_api.expect(page.locator("#state")).to_have_text("live")


def core_now(address: str, **fields: Any) -> dict[str, Any]:
    return {
        "core_id": f"core at {address}", "address": address, "model": "smol", "state": "ready", "running": 1,
        "waiting": 0, "own": 1, "kv_used": 0.5, "cached": 0.25, "step_ms": 12.0, "output_tokens_per_s": 100.0,
        "input_tokens_per_s": 1_000.0, "preemptions": 0,
    } | fields  # fmt: skip


def snapshot(at: float, **fields: Any) -> dict[str, Any]:
    nothing = {"p50": 0.0, "p90": 0.0, "p99": 0.0, "count": 0}
    return {
        "frontend": "one", "not_ready": None, "time": at, "running": 0, "waiting": 0, "requests_per_s": 0.0,
        "failed_per_s": 0.0, "output_tokens_per_s": 0.0, "input_tokens_per_s": 0.0, "time_to_first_token": nothing,
        "token_gap": nothing, "cores": [],
    } | fields  # fmt: skip


async def play(page: Any, *snapshots: dict[str, Any]) -> None:
    """Reloads the page, and answers its request for snapshots with these; when it asks again, it waits for ever."""
    streams = ["".join(f"data: {json.dumps(each)}\n\n" for each in snapshots)]

    async def answer(route: Any) -> None:
        if streams:
            await route.fulfill(body=streams.pop(), headers={"Content-Type": "text/event-stream"})

    await page.route("**/dashboard/events", answer)
    await page.reload()
    await playwright_api.expect(page.locator("#frontend")).to_have_text(snapshots[-1]["frontend"])


async def test_the_numbers_are_those_of_the_front_end_and_its_core(
    text: ModelText, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet_frontend.telemetry.live.RATE_S", 3_600.0)  # what happened once is seen to the end
    expect = playwright_api.expect
    occupancy, shown = Occupancy(), Shown(interval=0.1)
    edge = shown.watch(occupancy)
    async with (
        FakeCore(f"127.0.0.1:{free_port()}", core_id="core-7", model_name="smol-model") as core,
        running(text, [core], occupancy=occupancy, edge=edge, dashboard=shown) as front_end,
        visit(front_end.url, path=PAGE) as page,
    ):
        await live(page)
        assert await page.title() == "Dashboard · Tercet"
        await expect(page.locator("#frontend")).to_have_text("a front end")
        await expect(figure(page, "Requests", "running")).to_have_text("0")
        await expect(figure(page, "Time to first token", "p50")).to_have_text("\u2013")

        async with httpx.AsyncClient(base_url=front_end.url, timeout=60) as client:
            async with client.stream("POST", CHAT, json=body(stream=True)):
                first = await core.next_request()
                first.send(5, 6)
                async with client.stream("POST", CHAT, json=body(stream=True)):
                    second = await core.next_request()
                    await expect(figure(page, "Requests", "running")).to_have_text("1")
                    await expect(figure(page, "Requests", "waiting")).to_have_text("1")
                    core.stats(
                        running=1, waiting=1, free_blocks=250, num_blocks=1000, prompt_tokens=4_000,
                        cached_tokens=1_000, output_tokens=9_000, preemptions=5, step_ms=12.5,
                    )  # fmt: skip
                    await expect(figure(page, "Tokens out", "generated")).to_have_text(NUMBER)
                    await expect(figure(page, "Tokens in", "of prompts")).to_have_text(NUMBER)
                    await expect(figure(page, "KV cache", "mean")).to_have_text("75%")
                    await expect(figure(page, "Time to first token", "p50")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
                    cells = page.get_by_role("row", name="core-7").get_by_role("cell")
                    texts = [found.strip() for found in await cells.all_inner_texts()]
                    assert texts[:7] == ["ready", "smol-model", "1", "1", "2", "75%", "25%"]
                    assert texts[7] == "13 ms"
                    assert NUMBER.match(texts[8])
                    assert texts[10] == "5"
                    for request in (first, second):
                        request.send(2, finish=STOP, stop_id=2)
                    await expect(figure(page, "Requests", "running")).to_have_text("0")
                    await expect(figure(page, "Ended", "ended")).to_have_text(re.compile(r"^0?[\d.]*[1-9]"))
                    await expect(figure(page, "Ended", "of these failed")).to_have_text("0")
        await core.kill()
        await expect(page.locator(".state")).to_have_text("connecting")
        await expect(page.locator("#notice")).to_contain_text("core at")
        await expect(page.locator("#status")).to_have_text(f"The core at {core.address} is now connecting.")


async def test_the_key_is_asked_for_and_kept_for_the_tab(text: ModelText, visit: Visit) -> None:
    expect = playwright_api.expect
    async with (
        FakeCore() as core,
        running(text, [core], keys=["secret"], dashboard=Shown()) as front_end,
        visit(front_end.url, path=PAGE, expect="401") as page,
    ):
        await expect(page.locator("#notice")).to_contain_text("asks for an API key")
        await page.get_by_role("button", name="Enter a key").click()
        await expect(page.locator("#key")).to_be_focused()
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#notice")).to_contain_text("does not accept")
        await page.click("#set-key")
        await page.fill("#key", "secret")
        await page.keyboard.press("Enter")
        await live(page)
        await expect(page.locator("#notice")).to_be_hidden()
        await page.reload()
        await live(page)
        assert await page.evaluate("localStorage.getItem('tercet.key')") is None


async def test_a_lost_connection_is_said_and_comes_back(text: ModelText, visit: Visit) -> None:
    expect = playwright_api.expect
    shown = Shown()
    async with (
        FakeCore() as core,
        running(text, [core], dashboard=shown) as front_end,
        visit(front_end.url, path=PAGE, expect="ERR_|503") as page,
    ):
        await live(page)
        await page.route("**/dashboard/events", lambda route: route.abort("connectionrefused"))
        await page.reload()
        await expect(page.locator("#state")).to_have_text("not live")
        await expect(page.locator("#notice")).to_contain_text("cannot be reached")
        await page.unroute("**/dashboard/events")
        await live(page)
        await expect(page.locator("#notice")).to_be_hidden()
        assert shown.dashboard is not None
        shown.dashboard.close()
        await expect(page.locator("#notice")).to_contain_text("shutting down")
        await expect(page.locator("#state")).to_have_text("not live")


async def test_charts_show_the_last_minutes_and_what_is_pointed_at(text: ModelText, visit: Visit) -> None:
    expect = playwright_api.expect
    now = time.time()
    # Ten minutes of which five are kept, with a hole between 200 and 100 seconds ago.
    times = [ago for ago in range(600, -1, -1) if not 100 < ago < 200]
    gap = {"p50": 0.0123, "p90": 0.1, "p99": 1.5, "count": 9}
    history = [
        snapshot(now - ago, running=ago, token_gap=gap, cores=[core_now("10.0.0.1:1"), core_now("10.0.0.2:1")])
        for ago in times
    ]
    async with FakeCore() as core, running(text, [core], dashboard=Shown()) as front_end:
        async with visit(front_end.url, path=PAGE) as page:
            await play(page, *history)
            await expect(figure(page, "Requests", "running")).to_have_text("0")
            await expect(figure(page, "Time between tokens", "p50")).to_have_text("12 ms")
            await expect(figure(page, "Time between tokens", "p99")).to_have_text("1.5 s")
            line = await card(page, "Requests").locator(".plot .line.s0").get_attribute("d")
            assert line.count("M") == 2  # it is broken where nothing is known
            points = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line)]
            assert len(points) == 202
            assert points == sorted(points)  # fewer and fewer requests: further and further down
            assert await card(page, "Time to first token").locator(".plot .line.s0").get_attribute("d") == ""

            plot = card(page, "Requests").locator(".plot")
            box = await plot.bounding_box()
            await plot.hover(position={"x": 46 + (box["width"] - 54) * 0.2, "y": 40})  # a fifth of five minutes
            shown = int(await figure(page, "Requests", "running").inner_text())
            assert abs(shown - 240) <= 3
            await page.mouse.move(0, 0)
            await expect(figure(page, "Requests", "running")).to_have_text("0")

            await page.get_by_text("The last five minutes as a table").click()
            rows = page.locator("#minutes-body tr")
            await expect(rows.first).to_contain_text("12 ms")
            heads = await page.locator("#minutes-head th").all_inner_texts()
            column = heads.index("Requests: running") + 1
            values = await page.locator(f"#minutes-body tr > :nth-child({column})").all_inner_texts()
            assert values == [str(ago) for ago in (*range(0, 91, 15), 200, *range(215, 300, 15))]
            assert await rows.first.locator("th").get_attribute("scope") == "row"


async def test_cores_come_and_go_and_another_front_end_begins_anew(text: ModelText, visit: Visit) -> None:
    expect = playwright_api.expect
    now = time.time()
    evil = "<img src=x onerror=alert(1)>"
    async with FakeCore() as core, running(text, [core], dashboard=Shown()) as front_end:
        async with visit(front_end.url, path=PAGE) as page:
            both = [core_now("a"), core_now("b", state="draining", core_id=evil)]
            await play(page, snapshot(now, cores=[core_now("a"), core_now("c")]), snapshot(now + 1, cores=both))
            names = page.locator("#cores .core")
            await expect(names).to_have_text(["core at a", evil])
            await expect(page.locator("#cores .state")).to_have_text(["ready", "draining"])
            assert await page.locator("#cores img").count() == 0
            heads = await page.locator("#fleet thead th").count()
            assert await page.locator("#cores tr").first.locator("th, td").count() == heads

            other = snapshot(now + 2, frontend="two", running=3, cores=[core_now("a")], not_ready="It drains.")
            await play(page, snapshot(now, running=9), snapshot(now + 1, running=9), other)
            await expect(page.locator("#status")).to_have_text("Another front end answers now: two.")
            line = await card(page, "Requests").locator(".plot .line.s0").get_attribute("d")
            assert line.count("L") == 0


async def test_colours_follow_the_system_and_the_switch(text: ModelText, visit: Visit) -> None:
    async def background(page: Any) -> int:
        colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    async with FakeCore() as core, running(text, [core], dashboard=Shown()) as front_end:
        async with visit(front_end.url, path=PAGE, color_scheme="dark") as page:
            await live(page)
            assert await background(page) < 150
            await page.emulate_media(color_scheme="light")
            assert await background(page) > 700
            await page.get_by_label("dark", exact=True).check()
            assert await background(page) < 150
            await page.reload()
            assert await background(page) < 150


async def test_every_width(text: ModelText, visit: Visit) -> None:
    expect = playwright_api.expect
    long = [core_now(f"10.0.0.{index}:{'1' * 80}", core_id="name" * 40, model="model" * 30) for index in range(3)]
    async with FakeCore() as core, running(text, [core], dashboard=Shown()) as front_end:
        async with visit(front_end.url, path=PAGE, viewport={"width": 320, "height": 700}) as page:
            await play(page, snapshot(time.time(), frontend="host" * 30, not_ready="long" * 100, cores=long))
            await expect(page.locator("#cores tr")).to_have_count(3)
            for width in (320, 390, 768, 1024, 2560):
                await page.set_viewport_size({"width": width, "height": 700})
                inner, outer = await page.evaluate(
                    "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
                )
                assert inner <= outer, width
                boxes = [await each.bounding_box() for each in await page.locator(".card").all()]
                assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes), width


async def test_the_whole_system(serving: Serving, visit: Visit) -> None:
    expect = playwright_api.expect
    async with visit(serving.url, path=PAGE) as page, httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        await live(page)
        await expect(page.locator("#cores .state")).to_have_text(["ready"])
        long = body(model="smollm2", max_tokens=4_000, ignore_eos=True, stream=True)
        async with client.stream("POST", CHAT, json=long):  # it goes on while the page is looked at
            await expect(figure(page, "Tokens out", "generated")).to_have_text(NUMBER)
            await expect(figure(page, "Time to first token", "p50")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
            await expect(figure(page, "Step", "mean")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
