"""The server's API as the chat needs it: which models there are, and one streamed answer at a time."""

from __future__ import annotations

import ipaddress
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import httpx

from tercet_shared.errors import TercetError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_CONNECT_S = 10.0
"""Seconds for a connection; an answer itself may take any time."""


class ServerError(TercetError):
    """The server cannot be reached, refused the request, or ended the answer with an error."""


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens the answer took."""

    tokens: int


Part: TypeAlias = Content | Reasoning | Finished | Usage


class ChatClient:
    """A connection to one server. An async context manager.

    Args:
        url: below which the API is; ends in ``/v1``.
        api_key: key to send; none, if empty.
    """

    def __init__(self, url: httpx.URL, api_key: str = "") -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            # A proxy of the environment is no way to this machine itself.
            trust_env=not _is_loopback(url.host),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        del error
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Returns the names of the models that are served.

        Raises:
            ServerError: the server cannot be reached, or does not say.
        """
        async with self._errors():
            response = await self._http.get(f"{self._url}/models")
            await self._check(response)
            names = [str(entry["id"]) for entry in response.json()["data"]]
        if not names:
            raise ServerError(f"The server at {self._url} serves no model yet; try again in a few seconds.")
        return names

    async def stream(self, request: dict[str, Any]) -> AsyncGenerator[Part]:
        """Yields the parts of an answer. Closing the iterator ends the request at the server.

        Args:
            request: the body of ``/v1/chat/completions``, without its streaming options.

        Raises:
            ServerError: the request was refused, or the answer ended early.
        """
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        url = f"{self._url}/chat/completions"
        done = False
        async with self._errors(), self._http.stream("POST", url, json=body) as response:
            await self._check(response)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:"):
                    continue
                if data == "[DONE]":
                    done = True
                    continue
                for part in _parts(json.loads(data)):
                    yield part
        if not done:
            raise ServerError("The connection broke before the answer was complete.")

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turns what the HTTP library raises into sentences."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            where = self._url.copy_with(path="/")
            raise ServerError(
                f"Nothing answers at {where}: start a server with `tercet serve MODEL`, or name another one with --url."
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(f"The connection to {self._url} failed: {str(error) or type(error).__name__}.") from error
        except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"What answers at {self._url} has no OpenAI-style API.") from error

    async def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        await response.aread()
        try:
            message = str(response.json()["error"]["message"])
        except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError):
            message = f"the server answered {response.status_code} {response.reason_phrase}".strip() + "."
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " Give it with TERCET_API_KEY or --api-key."
        raise ServerError(message)


def _parts(chunk: dict[str, Any]) -> list[Part]:
    if error := chunk.get("error"):
        raise ServerError(str(error["message"]))
    found: list[Part] = []
    for choice in chunk["choices"][:1]:
        delta = choice["delta"]
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            found.append(Reasoning(thought))
        if text := delta.get("content"):
            found.append(Content(text))
        if reason := choice.get("finish_reason"):
            found.append(Finished(reason))
    if usage := chunk.get("usage"):
        found.append(Usage(int(usage["completion_tokens"])))
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
