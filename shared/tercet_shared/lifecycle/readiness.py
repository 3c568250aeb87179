"""Before and after a start: is the port free, and does the front end say that it can serve?"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Final

from tercet_shared.errors import ConfigurationError, UnavailableError, bounded

_MAX_ANSWER: Final = 256 * 1024
_RETRY_S: Final = 0.05  # between two questions; the front end learns of the worker's readiness a frame later than we do
_ANSWER_S: Final = 2.0


def check_port(host: str, port: int) -> None:
    """Raises ConfigurationError if nothing can listen on ``host``:``port``: in use, not allowed, not this machine's."""
    family, kind, protocol, address = address_of(host, port)
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections of an earlier server that still linger do not count, a listening one does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigurationError(why_not(host, port, error), param="port") from None


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, Any]:
    """Returns family, kind, protocol and address of the socket that listens there. Raises `ConfigurationError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(f"The host {host} is not known: {error.strerror}.", param="host") from None
    return family, kind, protocol, address


def why_not(host: str, port: int, error: OSError) -> str:
    """Returns a sentence on why nothing can listen there."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use by another program; choose another with --port."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} may not be used by this user; choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; choose another with --host."
    return f"Nothing can listen on {host}:{port}: {error.strerror}."


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Returns the URL under which a server that listens on ``host`` is reached from this machine."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # compared only
    scheme = "https" if tls else "http"
    return f"{scheme}://[{reached}]:{port}" if ":" in reached else f"{scheme}://{reached}:{port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer: its status and its body."""

    status: int
    body: bytes


async def fetch(host: str, port: int, path: str, *, api_key: str | None = None, tls: bool = False) -> Answer:
    """Returns the answer to ``GET path``; with ``tls``, of a server whose certificate need not be for this address.

    Raises:
        OSError: nobody answers (also as TimeoutError).
        UnavailableError: what answers does not speak HTTP.
    """
    reached = url_of(host, port).removeprefix("http://").rpartition(":")[0].strip("[]")
    lines = [f"GET {path} HTTP/1.0", f"Host: {reached}"]  # 1.0: no chunks, and the answer ends with the connection
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    async with asyncio.timeout(_ANSWER_S):
        reader, writer = await asyncio.open_connection(reached, port, ssl=_trusting() if tls else None)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode())
            raw = bytearray()
            while len(raw) < _MAX_ANSWER and (chunk := await reader.read(64 * 1024)):
                raw += chunk
        finally:
            writer.close()
    head, _, body = bytes(raw).partition(b"\r\n\r\n")
    parts = head.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or not parts[1].isdigit():
        raise UnavailableError(f"What answers on port {port} does not speak HTTP.")
    return Answer(int(parts[1]), body)


def _trusting() -> ssl.SSLContext:
    # The server is our own child, on this machine; its certificate is for the name under which others know it.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def wait_until_ready(host: str, port: int, *, timeout_s: float = 15.0, tls: bool = False) -> None:
    """Returns once ``/readyz`` answers 200.

    The services have reported ready by then; what is left is one frame from the core to the front end, for which there
    is no event here. So this asks again, for a bounded time.

    Raises:
        UnavailableError: it does not within ``timeout_s`` seconds; the sentence quotes the last answer.
    """
    last = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    answer = await fetch(host, port, "/readyz", tls=tls)
                    if answer.status == 200:
                        return
                    last = f"{answer.status} {bounded(answer.body.decode(errors='replace').strip(), 300)}"
                except OSError as error:
                    last = str(error) or type(error).__name__
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise UnavailableError(f"The services have started, but /readyz still says: {last}") from None


async def served_model(host: str, port: int, api_key: str | None, *, tls: bool = False) -> str | None:
    """Returns the first name that ``/v1/models`` lists, or None if it does not say."""
    try:
        answer = await fetch(host, port, "/v1/models", api_key=api_key, tls=tls)
        name = json.loads(answer.body)["data"][0]["id"]
    except (OSError, UnavailableError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None
