"""The command: ``tercet chat``."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console

from tercet_shared.config import parse
from tercet_shared.errors import ConfigurationError, TercetError
from tercet_tools.chat.client import ChatClient, ServerError
from tercet_tools.chat.conversation import Conversation, Message
from tercet_tools.chat.reader import Reader, history_path
from tercet_tools.chat.screen import PlainAnswer
from tercet_tools.chat.session import COMMANDS, Session, ask
from tercet_tools.chat.settings import ChatSettings

if TYPE_CHECKING:
    import httpx

_FAILED: Final = 1
_USAGE: Final = 2
_INTERRUPTED: Final = 130


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        settings = parse(ChatSettings, arguments)
        url = settings.base_url()
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        question = "" if interactive else _question()
    except ConfigurationError as error:
        return _fail(error, _USAGE)
    try:
        return asyncio.run(_talk(settings, url) if interactive else _answer(settings, url, question))
    except TercetError as error:
        return _fail(error, _FAILED)
    except KeyboardInterrupt:
        return _INTERRUPTED


async def _talk(settings: ChatSettings, url: httpx.URL) -> int:
    async with _client(settings, url) as client:
        conversation = Conversation(await _model(client, settings), settings.system, settings.parameters())
        await Session(client, conversation, Console(), Reader(COMMANDS, history_path(os.environ))).run()
    return 0


async def _answer(settings: ChatSettings, url: httpx.URL, question: str) -> int:
    async with _client(settings, url) as client:
        conversation = Conversation(await _model(client, settings), settings.system, settings.parameters())
        conversation.messages.append(Message("user", question))
        answer, error = await ask(client, conversation.request(), PlainAnswer(sys.stdout))
    if error is not None:
        raise error
    return 0 if answer.finish_reason else _INTERRUPTED


def _client(settings: ChatSettings, url: httpx.URL) -> ChatClient:
    return ChatClient(url, settings.api_key[0] if settings.api_key else "")


async def _model(client: ChatClient, settings: ChatSettings) -> str:
    models = await client.models()
    if settings.model is not None and settings.model not in models:
        raise ServerError(f"The server does not serve {settings.model!r}, but {', '.join(models)}.")
    return settings.model or models[0]


def _question() -> str:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigurationError("What came on standard input is not text in UTF-8.") from None
    if not text.strip():
        raise ConfigurationError("Nothing came on standard input that could be asked.")
    return text.removesuffix("\n")


def _fail(error: TercetError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the command's own output
    return code
