"""Routes whose endpoints take the request as it is, and return a response.

FastAPI would still look for dependencies, parameters and a body at every request, a fifth of what a short one costs. In
its OpenAPI document they are as others.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, cast

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

Endpoint: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


class PlainRoute(APIRoute):
    """A route for an `Endpoint`."""

    def get_route_handler(self) -> Endpoint:
        """Returns the endpoint itself."""
        return cast("Endpoint", self.endpoint)
