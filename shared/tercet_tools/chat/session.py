"""A conversation at a terminal: messages, answers and the commands in between."""

from __future__ import annotations

import asyncio
import signal
import sys
import termios
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape

from tercet_shared.errors import TercetError
from tercet_tools.chat.answer import Answer
from tercet_tools.chat.client import Content, Reasoning
from tercet_tools.chat.conversation import PARAMETERS, Message, load
from tercet_tools.chat.reader import MARK
from tercet_tools.chat.screen import MarkdownAnswer, printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from rich.console import Console

    from tercet_tools.chat.client import ChatClient
    from tercet_tools.chat.conversation import Conversation
    from tercet_tools.chat.reader import Reader
    from tercet_tools.chat.screen import AnswerView

COMMANDS: Final = {
    "/help": "shows this",
    "/retry": "asks for another answer to the last message",
    "/edit": "takes the last message back, to change it",
    "/clear": "begins a new conversation",
    "/system": "sets the system prompt; alone shows it, - takes it away",
    "/params": "sets parameters, as in temperature=0.2 seed=7 or stop=; alone shows them",
    "/model": "changes the model; alone lists them",
    "/save": "writes the conversation to a file, which the chat page imports too",
    "/load": "goes on with the conversation of a file",
    "/quit": "leaves, as Ctrl-D does",
}
"""What can be typed instead of a message, and what it does."""

_KEYS: Final = "Enter sends, Alt+Enter breaks the line, Ctrl-C stops an answer, Ctrl-D leaves."

_ENDS: Final = {
    "length": "The answer reached its limit of tokens; raise it with /params max_tokens=N.",
    "": "Stopped.",
}


class CommandError(TercetError):
    """A command that cannot be followed as it was typed."""


@dataclass
class Session:
    """See the module.

    Attributes:
        client: connected to the server.
        conversation: what was said so far.
        console: the terminal.
        reader: asks for messages.
    """

    client: ChatClient
    conversation: Conversation
    console: Console
    reader: Reader
    _draft: str = ""
    _over: bool = False

    async def run(self) -> None:
        """Talks until the person leaves."""
        self._say(f"{self.conversation.model}. /help lists what else can be done here. {_KEYS}")
        while not self._over:
            draft, self._draft = self._draft, ""
            try:
                text = await self.reader.read(draft)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("Ctrl-D or /quit leaves.")
                continue
            try:
                await self._take(text)
            except TercetError as error:
                self.console.print(f"[red]{escape(printable(error.message))}[/]", highlight=False)

    async def _take(self, text: str) -> None:
        if not text.strip():
            return
        if not text.startswith("/"):
            self.conversation.messages.append(Message("user", text))
            await self._answer()
            return
        name, _, rest = text.strip().partition(" ")
        action = self._actions().get(name)
        if action is None:
            raise CommandError(f"There is no command {name}; /help lists them.")
        await action(rest.strip())

    async def _answer(self) -> None:
        answer, error = await ask(self.client, self.conversation.request(), MarkdownAnswer(self.console))
        if answer.content or answer.reasoning:
            self.conversation.messages.append(Message("assistant", answer.content, answer.reasoning))
        if error is not None:
            raise CommandError(f"{error.message} /retry asks again.")
        notes = [_ENDS.get(answer.finish_reason, ""), answer.figures()]
        self._say("  ".join(note for note in notes if note))
        self.console.print()

    def _say(self, text: str) -> None:
        self.console.print(f"[dim]{escape(printable(text))}[/]", highlight=False)

    # ------------------------------------------------------------------------------------------------ commands

    def _actions(self) -> dict[str, Callable[[str], Awaitable[None]]]:
        return {
            "/help": self._help, "/retry": self._retry, "/edit": self._edit, "/clear": self._clear,
            "/system": self._system, "/params": self._params, "/model": self._model, "/save": self._save,
            "/load": self._load, "/quit": self._quit,
        }  # fmt: skip

    async def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for name, what in COMMANDS.items():
            self._say(f"{name:<{width}}  {what}")
        self._say(_KEYS)

    async def _retry(self, _: str) -> None:
        if not self.conversation.drop_answer():
            raise CommandError("There is no message yet that could be answered again.")
        await self._answer()

    async def _edit(self, _: str) -> None:
        text = self.conversation.drop_question()
        if text is None:
            raise CommandError("There is no message yet that could be changed.")
        self._draft = text

    async def _clear(self, _: str) -> None:
        self.conversation = self.conversation.cleared()
        self._say("A new conversation.")

    async def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text
        self._say(self.conversation.system or "There is no system prompt.")

    async def _params(self, text: str) -> None:
        self.conversation.params = changed_params(self.conversation.params, text)
        shown = " ".join(f"{name}={value}" for name, value in self.conversation.params.items())
        self._say(shown or f"The server's defaults. Parameters: {', '.join(PARAMETERS)}.")

    async def _model(self, name: str) -> None:
        models = await self.client.models()
        if name:
            if name not in models:
                raise CommandError(f"The server does not serve {name!r}, but {', '.join(models)}.")
            self.conversation.model = name
        for model in models:
            self._say(f"{'*' if model == self.conversation.model else ' '} {model}")

    async def _save(self, name: str) -> None:
        path = _path(name, "/save")
        self.conversation.save(path)
        self._say(f"Saved as {path}.")

    async def _load(self, name: str) -> None:
        loaded = load(_path(name, "/load"))
        if loaded.model not in await self.client.models():
            loaded.model = self.conversation.model
        self.conversation = loaded
        for message in loaded.messages:
            if message.role == "user":
                self.console.print(f"[green]{MARK}[/] {escape(printable(message.content))}", highlight=False)
            elif message.content:
                with MarkdownAnswer(self.console) as view:
                    view.content(message.content)
        self._say(f"{len(loaded.messages)} messages.")

    async def _quit(self, _: str) -> None:
        self._over = True


async def ask(client: ChatClient, request: dict[str, Any], view: AnswerView) -> tuple[Answer, TercetError | None]:
    """Streams one answer into a view; Ctrl-C ends it, at the server too.

    Returns:
        What came of the answer, and why it failed, if it did. It was stopped where there is neither that nor a reason
        for its end.
    """
    answer = Answer()
    loop = asyncio.get_running_loop()

    async def receive() -> None:
        async with aclosing(client.stream(request)) as parts:
            async for part in parts:
                answer.add(part)
                if isinstance(part, Content):
                    view.content(part.text)
                elif isinstance(part, Reasoning):
                    view.reasoning(part.text)

    with _silent_keys():
        task = asyncio.ensure_future(receive())
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            with view:
                await asyncio.wait([task])
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    if task.cancelled():
        return answer, None
    error = task.exception()
    if error is not None and not isinstance(error, TercetError):
        raise error
    return answer, error


def changed_params(params: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns parameters after ``temperature=0.2 stop=``; a name without a value goes back to the server's default.

    Raises:
        CommandError: a name that does not exist, or a value that is not one.
    """
    changed = dict(params)
    for assignment in text.split():
        name, equals, value = assignment.partition("=")
        if name not in PARAMETERS or not equals:
            raise CommandError(f"{assignment!r} is not name=value with one of {', '.join(PARAMETERS)}.")
        changed.pop(name, None)
        if value:
            try:
                changed[name] = PARAMETERS[name](value)
            except ValueError:
                raise CommandError(f"{name} cannot be {value!r}.") from None
    return changed


def _path(name: str, command: str) -> Path:
    if not name:
        raise CommandError(f"Name a file: {command} FILE.")
    return Path(name).expanduser()


@contextmanager
def _silent_keys() -> Iterator[None]:
    """Keeps what is typed during an answer out of it; it is there for the next message."""
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(number, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)
