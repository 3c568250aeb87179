"""A real browser (headless Chromium) for tests of the pages; they are skipped where there is none.

On Debian: ``apt-get install chromium``; the client library is in the group ``test`` of pyproject.toml.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest

playwright_api = pytest.importorskip(
    "playwright.async_api", reason="playwright, which drives the browser, is not installed"
)

TIMEOUT_MS = 60_000
"""Far beyond what anything here takes, also on a loaded machine."""

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (on Debian: apt-get install chromium)"
)

Visit: TypeAlias = Callable[..., AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def browser() -> AsyncIterator[Visit]:
    """Opens the page at a URL; at the end nothing must have gone wrong in it, and no other host been asked."""
    playwright_api.expect.set_options(timeout=TIMEOUT_MS)
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with playwright_api.async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)

        @asynccontextmanager
        async def open_page(url: str, *, expect: str = "", path: str = "", **context: Any) -> AsyncIterator[Any]:
            problems: list[str] = []
            async with await chromium.new_context(**context) as session:
                session.set_default_timeout(TIMEOUT_MS)
                page = await session.new_page()
                page.on("console", lambda message: message.type == "error" and problems.append(message.text))
                page.on("pageerror", lambda error: problems.append(str(error)))
                page.on("request", lambda request: request.url.startswith(url) or problems.append(request.url))
                await page.goto(url + path)
                yield page
                await page.evaluate("0")
            unexpected = [problem for problem in problems if not (expect and re.search(expect, problem))]
            # Files that the page makes itself are no requests to a host.
            assert [problem for problem in unexpected if not problem.startswith("blob:")] == []

        try:
            yield open_page
        finally:
            await chromium.close()
