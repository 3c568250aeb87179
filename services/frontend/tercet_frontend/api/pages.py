"""``GET /`` and ``GET /dashboard``, and what they load from ``/assets/``. No secret is in them, so they need no key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tercet_frontend.pages import chat_page_files, dashboard_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tercet_frontend.pages import PageFile


class Pages:
    """The routes of the pages.

    Attributes:
        paths: where they answer.
        router: the routes.
    """

    def __init__(self, *, chat: bool, dashboard: bool) -> None:
        """Reads the files of those pages that are switched on."""
        files = (chat_page_files() if chat else {}) | (dashboard_files() if dashboard else {})
        self.paths = frozenset(files)
        self.router = APIRouter(include_in_schema=False)
        for path, file in files.items():
            self.router.add_api_route(path, _endpoint(file), methods=["GET", "HEAD"])


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        compressed = _accepts_gzip(request.headers.get("accept-encoding", ""))
        etag = file.etag(compressed=compressed)
        headers = {**file.headers, "ETag": etag}
        if _matches(request.headers.get("if-none-match", ""), etag):
            del headers["Content-Type"]
            return Response(status_code=304, headers=headers)
        if compressed:
            headers["Content-Encoding"] = "gzip"
        # The server leaves the body out of an answer to HEAD.
        return Response(file.compressed if compressed else file.content, headers=headers)

    return serve


def _accepts_gzip(header: str) -> bool:
    """Returns whether ``Accept-Encoding`` names gzip without refusing it (RFC 9110, section 12.5.3)."""
    for part in header.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


def _matches(header: str, etag: str) -> bool:
    """Returns whether ``If-None-Match`` names ``etag``, compared weakly (RFC 9110, section 13.1.2)."""
    tags = {tag.strip().removeprefix("W/") for tag in header.split(",")}
    return "*" in tags or etag in tags
