"""The files of the pages, read once: what is served, from which path, under which headers."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

ASSETS: Final = "/assets/"
"""Where the files are that the pages load."""

_SHARED: Final = frozenset({"api.js", "base.css", "dom.js", "icon.svg", "page.js", "sse.js", "theme.js"})
"""What both pages load."""

_DASHBOARD: Final = frozenset(
    {"cores.js", "chart.js", "dashboard.css", "dashboard.html", "dashboard.js", "feed.js", "figures.js", "history.js"}
)
"""What the dashboard alone loads; all other files are the chat page's own."""

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_DIRECTIVES: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # No script may hand text to the browser as markup: what a model says stays text.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is served.

    Attributes:
        content: the bytes.
        compressed: the same as gzip, for clients that accept it.
        headers: of every response with it, except what depends on the encoding.
        digest: hexadecimal; changes with the content.
    """

    content: bytes
    compressed: bytes
    headers: dict[str, str]
    digest: str

    def etag(self, *, compressed: bool) -> str:
        """Returns the entity tag; each encoding has its own."""
        return f'"{self.digest}-gzip"' if compressed else f'"{self.digest}"'


def chat_page_files() -> dict[str, PageFile]:
    """Returns the files of the chat page by URL path; the page itself is ``/``."""
    return _files("index.html", "/", lambda name: name not in _DASHBOARD)


def dashboard_files() -> dict[str, PageFile]:
    """Returns the files of the dashboard by URL path; the page itself is ``/dashboard``."""
    return _files("dashboard.html", "/dashboard", lambda name: name in _DASHBOARD | _SHARED)


def _files(page: str, path: str, belongs: Callable[[str], bool]) -> dict[str, PageFile]:
    root = resources.files("tercet_frontend.pages") / "assets"
    files = {
        ASSETS + entry.name: _file(entry.name, entry.read_bytes())
        for entry in root.iterdir()
        if _served(entry.name) and belongs(entry.name)
    }
    files[path] = files.pop(ASSETS + page)
    return files


def _served(name: str) -> bool:
    return PurePosixPath(name).suffix in _MEDIA_TYPES


def _file(name: str, content: bytes) -> PageFile:
    headers = {
        "Content-Type": _MEDIA_TYPES[PurePosixPath(name).suffix],
        # Kept by browsers, and asked for again by tag: an updated server never meets half of an old page.
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(_DIRECTIVES),
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    return PageFile(content, gzip.compress(content, mtime=0), headers, sha256(content).hexdigest()[:32])
