"""The chat page over HTTP: its files, their headers, and who may have them. What it does is in tests/e2e."""

from __future__ import annotations

import asyncio
import gzip
import re
from typing import TYPE_CHECKING

import httpx
import pytest

from tercet_frontend.pages import chat_page_files
from tercet_frontend.server import serve
from tercet_shared.config import FrontendSettings, ServeSettings, parse
from tercet_shared.lifecycle.plan import plan_serve
from tests.contract.frontend.conftest import TIMEOUT, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText

FILES = chat_page_files()


async def test_the_page_and_all_that_it_loads(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        page = await front_end.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        loaded = set(re.findall(r'(?:src|href)="(assets/[^"]+)"', page.text))
        assert {"assets/app.js", "assets/style.css", "assets/theme.js", "assets/icon.svg"} <= loaded
        # Modules load further modules, from beside themselves.
        queue = list(loaded)
        while queue:
            found = await front_end.http.get(f"/{queue.pop()}")
            assert found.status_code == 200, found.url
            for name in re.findall(r"from '\./([\w.]+)'", found.text):
                if f"assets/{name}" not in loaded:
                    loaded.add(f"assets/{name}")
                    queue.append(f"assets/{name}")
        # Nothing is served that the page does not use.
        assert {f"/{path}" for path in loaded} == set(FILES) - {"/"}


@pytest.mark.parametrize("path", sorted(FILES))
async def test_headers(text: ModelText, path: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        found = await front_end.http.get(path)
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["cache-control"] == "no-cache"
    assert found.content == FILES[path].content


def test_no_file_names_another_host_or_holds_inline_code() -> None:
    page = FILES["/"].content.decode()
    assert re.search(r"<script(?! (?:type=\"module\" )?src=\"assets/)", page) is None
    assert re.search(r"<style|\sstyle=|\son\w+=", page) is None
    for path, file in FILES.items():
        names = set(re.findall(r"https?://([\w.-]+)", file.content.decode()))
        assert names <= {"www.w3.org"}, path  # the name of SVG's namespace; nothing is loaded from there


@pytest.mark.parametrize("path", ["/", "/assets/app.js"])
async def test_a_copy_that_is_still_right_is_not_sent_again(text: ModelText, path: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        http = front_end.http
        first = await http.get(path)
        etag = first.headers["etag"]
        for header in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            again = await http.get(path, headers={"If-None-Match": header})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
            assert again.headers["cache-control"] == "no-cache"
        assert (await http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200


async def test_encodings_have_tags_of_their_own(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        http = front_end.http
        async with http.stream("GET", "/", headers={"Accept-Encoding": "br, gzip;q=0.5"}) as packed:
            raw = b"".join([part async for part in packed.aiter_raw()])
        for refused in ("identity", "gzip;q=0", "gzip; q=0.0", ""):
            plain = await http.get("/", headers={"Accept-Encoding": refused})
            assert "content-encoding" not in plain.headers
            assert plain.headers["etag"] != packed.headers["etag"]
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert len(raw) < len(FILES["/"].content)
    assert gzip.decompress(raw) == FILES["/"].content


async def test_head_and_other_methods(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        head = await front_end.http.head("/", headers={"Accept-Encoding": "identity"})
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(FILES["/"].content)
        assert (await front_end.http.post("/")).status_code == 405
        for path in ("/assets/", "/assets/none.js", "/assets/../app.py", "/assets/files.py", "/index.html"):
            assert (await front_end.http.get(path)).status_code == 404


async def test_the_page_needs_no_key_and_the_api_still_does(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], keys=["secret"]) as front_end:
        async with httpx.AsyncClient(base_url=front_end.url, timeout=TIMEOUT) as stranger:
            for path in FILES:
                assert (await stranger.get(path)).status_code == 200
            for path in ("/v1/models", "/openapi.json", "/assets/none.js"):
                assert (await stranger.get(path)).status_code == 401, path
            assert (await stranger.post("/v1/chat/completions", json={})).status_code == 401


async def test_the_page_is_there_before_the_model_is(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], ready=False) as front_end:
        assert (await front_end.http.get("/")).status_code == 200
        assert (await front_end.http.get("/readyz")).status_code == 503


async def test_the_page_is_no_part_of_the_described_api(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        paths = (await front_end.http.get("/openapi.json")).json()["paths"]
    assert "/" not in paths
    assert not any(path.startswith("/assets") for path in paths)


def test_the_setting_reaches_the_front_end(tmp_path: Path) -> None:
    for flags, expected in (([], []), (["--no-chat-page"], ["--no-chat-page"])):
        front_end = plan_serve(parse(ServeSettings, [*flags, "model"]), tmp_path, {}).children[0]
        assert [argument for argument in front_end.argv if "chat-page" in argument] == expected


class _Reports:
    """Takes the reports of a front end; the first "ready" says where it listens."""

    def __init__(self) -> None:
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def progress(self, *_: object) -> None: ...

    def fatal(self, *_: object) -> None: ...

    def ready(self, **detail: object) -> None:
        self.url.set_result(str(detail["url"]))


@pytest.mark.parametrize(("flags", "status"), [([], 200), (["--no-chat-page"], 404)])
async def test_it_can_be_switched_off(model_path: Path, tmp_path: Path, flags: list[str], status: int) -> None:
    settings = parse(FrontendSettings, ["--port=0", f"--core=unix:{tmp_path}/none", *flags, str(model_path)])
    reports, stop = _Reports(), asyncio.Event()
    async with asyncio.TaskGroup() as group, httpx.AsyncClient(timeout=TIMEOUT) as http:
        group.create_task(serve(settings, reports, stop))  # type: ignore[arg-type]
        url = await asyncio.wait_for(reports.url, TIMEOUT)
        for path in ("/", "/assets/app.js"):
            assert (await http.get(url + path)).status_code == status
        assert (await http.get(f"{url}/livez")).status_code == 200
        stop.set()
