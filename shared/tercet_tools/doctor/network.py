"""Descriptors, ports and Redis."""

from __future__ import annotations

import os
import resource
import socket
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

_TIMEOUT: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What connections need.

    Attributes:
        files: descriptors that a process may have open (each connection is one), and how far it may raise that itself.
        address: where the server would listen.
        port_problem: why it could not listen there; empty where it could.
        redis: the URL without its password; None where none is configured.
        redis_problem: why it does not answer; empty where it does.
    """

    files: tuple[int, int]
    address: str
    port_problem: str
    redis: str | None
    redis_problem: str


def read_network(host: str, port: int, redis_url: str | None) -> Network:
    """Returns the limits, tries the port, and asks Redis."""
    return Network(
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        port_problem=port_problem(host, port),
        redis=None if redis_url is None else _without_password(redis_url),
        redis_problem="" if redis_url is None else redis_problem(redis_url),
    )


def port_problem(host: str, port: int) -> str:
    """Returns why a server cannot listen there; empty where it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except socket.gaierror:
        return "not an address of this machine"
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def redis_problem(url: str) -> str:
    """Asks a Redis for a sign of life; returns why there is none, or nothing. Source: the Redis protocol (RESP2)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
    except ValueError:
        return "not a URL"
    if parts.scheme not in ("redis", "rediss") or not host:
        return "not like redis://host:port/0"
    commands = []
    if parts.password:
        login = ([unquote(parts.username)] if parts.username else []) + [unquote(parts.password)]
        commands.append(["AUTH", *login])
    commands.append(["PING"])
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as plain:
            if parts.scheme == "redis":
                return _converse(plain, commands)
            with ssl.create_default_context().wrap_socket(plain, server_hostname=host) as secure:
                return _converse(secure, commands)
    except TimeoutError:
        return f"no answer within {_TIMEOUT:g} seconds"
    except OSError as error:
        return error.strerror or str(error)


def _converse(connection: socket.socket, commands: list[list[str]]) -> str:
    with connection.makefile("rb") as answers:
        for command in commands:
            words = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in command)
            connection.sendall(b"*%d\r\n%s" % (len(command), words))
            answer = answers.readline(1_000).decode(errors="replace").strip()
            if not answer.startswith("+"):
                return answer.removeprefix("-") or "the connection was closed"
    return ""


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(not a URL)"
    return f"{parts.scheme}://{host}{parts.path}"
