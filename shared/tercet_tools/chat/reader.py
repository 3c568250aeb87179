"""Reads messages at a terminal: several lines, a history, and names of commands that complete themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyPressEvent

MARK: Final = "\u203a"
"""What stands before the person's messages."""

_PROMPT: Final = HTML(f"<ansigreen><b>{MARK} </b></ansigreen>")


class Reader:
    """Asks for messages. Enter sends; Alt+Enter, Ctrl-J or a backslash before Enter breaks the line.

    Args:
        commands: names of commands and what they do.
        history: where what was said is kept over sessions; None keeps it while the program runs.
    """

    def __init__(self, commands: Mapping[str, str], history: Path | None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=_keys(),
            completer=_Commands(commands),
            complete_while_typing=True,
            prompt_continuation=lambda width, _number, _soft: " " * width,
            enable_open_in_editor=True,
        )

    async def read(self, draft: str = "") -> str:
        """Returns the next message.

        Args:
            draft: text to begin with.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C.
        """
        return await self._session.prompt_async(_PROMPT, default=draft)


def history_path(environ: Mapping[str, str]) -> Path | None:
    """Returns the file for the history, in the user's directory for state (XDG Base Directory); None without a home."""
    base = environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return root / "tercet" / "chat-history"


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created here so that nobody else can read what was said.
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _Commands(Completer):
    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Any]:  # noqa: ARG002
        """Yields the commands that begin with what is typed."""
        text = document.text_before_cursor
        if not text.startswith("/") or any(character.isspace() for character in text):
            return
        for name, help_text in self._commands.items():
            if name.startswith(text):
                yield Completion(name, -len(text), display_meta=help_text)
