"""A conversation and its file, which the chat page reads and writes too."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Literal

from tercet_shared.errors import TercetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PARAMETERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
    "stop": lambda text: [text],
}
"""Sampling parameters that can be set, and how each is read; ranges are the server's business."""

_FORMAT: Final = "tercet-chat"
_VERSION: Final = 1
_MAX_FILE: Final = 64 * 1024 * 1024
_TITLE: Final = 56


class ConversationFileError(TercetError):
    """A file that cannot be read or written, or does not hold a conversation."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one side said; ``reasoning`` is what the model thought first."""

    role: Literal["user", "assistant"]
    content: str
    reasoning: str = ""


def now_ms() -> int:
    """Returns milliseconds since 1970, as files have them."""
    return time.time_ns() // 1_000_000


@dataclass
class Conversation:
    """What is said, and what every answer is asked for with.

    Attributes:
        model: name of the model.
        system: system prompt; may be empty.
        params: sampling parameters, as the API names them.
        messages: in order; the last is the user's while an answer is waited for.
        id: the same as long as it is the same conversation, also in files.
        created: milliseconds since 1970.
    """

    model: str
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    id: str = field(default_factory=lambda: token_hex(12))
    created: int = field(default_factory=now_ms)

    def request(self) -> dict[str, Any]:
        """Returns the body that asks for the next answer."""
        messages = [{"role": message.role, "content": message.content} for message in self.messages if message.content]
        if self.system.strip():
            messages.insert(0, {"role": "system", "content": self.system})
        return {"model": self.model, "messages": messages, **self.params}

    def cleared(self) -> Conversation:
        """Returns a new conversation with the same settings."""
        return replace(self, messages=[], params=dict(self.params), id=token_hex(12), created=now_ms())

    def drop_answer(self) -> bool:
        """Drops everything after the last question; returns whether there is one."""
        last = self._last_question()
        if last is None:
            return False
        del self.messages[last + 1 :]
        return True

    def drop_question(self) -> str | None:
        """Drops the last question and what follows it; returns its text, if there is one."""
        last = self._last_question()
        if last is None:
            return None
        text = self.messages[last].content
        del self.messages[last:]
        return text

    def _last_question(self) -> int | None:
        questions = [index for index, message in enumerate(self.messages) if message.role == "user"]
        return questions[-1] if questions else None

    @property
    def title(self) -> str:
        """The first line of the first question, if there is one."""
        text = next((message.content for message in self.messages if message.role == "user"), "")
        line = " ".join(text.strip().partition("\n")[0].split())
        return line if len(line) <= _TITLE else line[: _TITLE - 1].rstrip() + "…"

    def save(self, path: Path) -> None:
        """Writes the conversation to a file.

        Raises:
            ConversationFileError: that is not possible.
        """
        conversation = {
            "id": self.id, "title": self.title or "Conversation", "named": False, "created": self.created,
            "updated": now_ms(), "model": self.model, "system": self.system, "params": self.params,
            "messages": [_without_empty(message) for message in self.messages],
        }  # fmt: skip
        document = {"format": _FORMAT, "version": _VERSION, "conversations": [conversation]}
        try:
            path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConversationFileError(f"{path} cannot be written: {error.strerror}.") from error


def load(path: Path) -> Conversation:
    """Returns the conversation of a file; of several, the one that was last written to.

    Raises:
        ConversationFileError: the file cannot be read, or holds none.
    """
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ConversationFileError(f"{path} is too large for a conversation.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversationFileError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConversationFileError(f"{path} is not JSON in UTF-8.") from error
    try:
        if document["format"] != _FORMAT:
            raise ConversationFileError(f"{path} does not hold conversations of Tercet.")
        if document["version"] != _VERSION:
            raise ConversationFileError(f"{path} was written by another version of Tercet.")
        found = max(document["conversations"], key=lambda entry: float(entry["updated"]))
        return _conversation(found)
    except (LookupError, TypeError, ValueError) as error:
        raise ConversationFileError(f"{path} does not hold a conversation of Tercet.") from error


def _conversation(entry: Any) -> Conversation:
    params = {name: entry["params"][name] for name in PARAMETERS if name in entry["params"]}
    return Conversation(
        model=str(entry["model"] or ""),
        system=str(entry["system"]),
        params=params,
        messages=[_message(message) for message in entry["messages"]],
        id=str(entry["id"]),
        created=int(entry["created"]),
    )


def _message(entry: Any) -> Message:
    role, content = entry["role"], entry["content"]
    if role not in ("user", "assistant") or not isinstance(content, str):
        raise ValueError("a message has a role of its own, and text")
    return Message(role, content, str(entry.get("reasoning", "")))


def _without_empty(message: Message) -> dict[str, str]:
    return {name: value for name, value in asdict(message).items() if value or name == "content"}
