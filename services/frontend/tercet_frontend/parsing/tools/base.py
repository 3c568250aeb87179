"""What the formats of tool calls share.

From text to calls, in all formats:

- A call is announced when its name is complete and its arguments begin. From then on it is a call, whatever follows: if
  its text breaks off, it has the arguments that came, streamed or not.
- Markup that does not come to that is given out as content, as soon as it is clear: a lone ``{``, a tag in prose, a
  call that was cut before its arguments.
- A name that the request does not offer is passed on where a tag of the model says that a call is meant (clients answer
  it as an error of the model). Where nothing but the shape of the text says so, it stays content.
- Arguments are passed on verbatim where they are JSON, and as they come.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from tercet_frontend.parsing.sink import FUNCTION_NAME

if TYPE_CHECKING:
    from tercet_frontend.parsing.reader import Reader, Steps
    from tercet_frontend.parsing.sink import Sink

Accepts: TypeAlias = Callable[[str], bool]
"""Whether a name may be one of a function."""

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"id", "index", "type"})
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """How calls are written: ``opening (before arguments after) between (before arguments after) … closing``.

    Attributes:
        before: with the function's name in place of ``{name}``.
    """

    before: str
    after: str
    between: str
    opening: str = ""
    closing: str = ""

    def head(self, name: str) -> str:
        """Returns what stands before the arguments of a call of ``name``."""
        return self.before.replace("{name}", name)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns calls, each a name and its arguments as JSON text, as a model writes them."""
        texts = [self.head(name) + arguments + self.after for name, arguments in calls]
        return self.opening + self.between.join(texts) + self.closing


class ToolFormat(ABC):
    """How one family of models writes calls. Stateless: what a choice needs is in the reader and the sink."""

    name: ClassVar[str]
    """In settings."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that may be special tokens, and that the parser must see."""

    layout: ClassVar[Layout | None] = None
    """What a grammar makes of the format; None where arguments are not JSON, and calls are enforced as plain JSON."""

    @abstractmethod
    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:
        """Reads the answer to its end.

        Args:
            reader: the text, from behind the reasoning.
            sink: takes content and calls.
            offered: names of the functions that the request offers.
        """

    @abstractmethod
    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns calls as a model of this family writes them, for models that have to be shown."""

    def new_id(self, random: str) -> str:
        """Returns the id of a call, made of 24 random hexadecimal digits."""
        return f"call_{random}"


class LaidOutFormat(ToolFormat):
    """A format whose calls are fixed text around JSON arguments."""

    layout: ClassVar[Layout]

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """See `ToolFormat`."""
        return self.layout.written(calls)


def is_name(name: str) -> bool:
    """Whether ``name`` may be a function's."""
    return FUNCTION_NAME.fullmatch(name) is not None


def begin_call(reader: Reader, sink: Sink, name: str) -> None:
    """Announces a call; what is held was its markup."""
    reader.drop()
    sink.begin(name)


def read_object(reader: Reader, sink: Sink, accepts: Accepts) -> Steps[bool]:
    """Reads one call as a JSON object with ``name`` and ``arguments`` (or ``parameters``), in any order.

    Returns:
        Whether the text was, or began, a call; then nothing is held any more. If not, what was read is the caller's to
        `Reader.release`, and what follows is unread.
    """
    if not (yield from reader.literal("{")):
        return False
    call = _ObjectCall(reader, sink, accepts)
    first = True
    while True:
        yield from reader.space()
        if (yield from reader.literal("}")):
            return call.ended()
        if not first:
            if not (yield from reader.literal(",")):
                return call.begun
            yield from reader.space()
        first = False
        key = yield from reader.key()
        if key is None or not (call.begun or key == "name" or key in _ARGUMENTS or key in _OTHERS):
            return call.begun
        yield from reader.space()
        if not (yield from reader.literal(":")):
            return call.begun
        yield from reader.space()
        if not (yield from _member(reader, call, key)):
            return call.begun


def _member(reader: Reader, call: _ObjectCall, key: str) -> Steps[bool]:
    """Reads the value of ``key``; returns whether the object may go on."""
    if key == "name" and not call.name:
        name = yield from reader.key()
        return name is not None and call.named(name)
    if key in _ARGUMENTS and call.arguments is None:
        return (yield from _arguments(reader, call))
    return (yield from reader.json(_nothing))


def _arguments(reader: Reader, call: _ObjectCall) -> Steps[bool]:
    if (yield from reader.peek()) != "{":
        # JSON in a string, or null; anything else is no call.
        pieces: list[str] = []
        complete = yield from reader.json(pieces.append)
        return complete and call.quoted("".join(pieces))
    call.open()
    return (yield from reader.json(call.piece))


class _ObjectCall:
    """What is known of a call while its object is read."""

    def __init__(self, reader: Reader, sink: Sink, accepts: Accepts) -> None:
        self._reader = reader
        self._sink = sink
        self._accepts = accepts
        self.name = ""
        self.arguments: list[str] | None = None  # that came before the name; afterwards they are in the sink
        self.begun = False

    def named(self, name: str) -> bool:
        if not self._accepts(name):
            return False
        self.name = name
        if self.arguments is not None:
            self._begin()
        return True

    def open(self) -> None:
        self.arguments = []
        if self.name:
            self._begin()

    def piece(self, text: str) -> None:
        if self.begun:
            self._sink.arguments(text)
        elif self.arguments is not None:
            self.arguments.append(text)

    def quoted(self, text: str) -> bool:
        value = _loads(text)
        if isinstance(value, str) and isinstance(_loads(value), dict):
            inner = value
        elif text == "null":
            inner = "{}"
        else:
            return False
        self.open()
        self.piece(inner)
        return True

    def ended(self) -> bool:
        if not self.begun and self.name:  # no arguments
            self.arguments = ["{}"]
            self._begin()
        return self.begun

    def _begin(self) -> None:
        self.begun = True
        begin_call(self._reader, self._sink, self.name)
        for piece in self.arguments or ():
            self._sink.arguments(piece)


def read_list(reader: Reader, sink: Sink, accepts: Accepts) -> Steps[bool]:
    """Reads calls as a JSON array of such objects.

    Returns:
        As `read_object`.
    """
    if not (yield from reader.literal("[")):
        return False
    yield from reader.space()
    if not (yield from read_object(reader, sink, accepts)):
        return False
    while True:
        reader.hold()
        yield from reader.space()
        if (yield from reader.literal("]")):
            reader.drop()
            return True
        if not (yield from reader.literal(",")):
            sink.content(reader.release())
            return True
        yield from reader.space()
        if not (yield from read_object(reader, sink, accepts)):
            sink.content(reader.release())
            return True


def read_close(reader: Reader, sink: Sink, *closing: str) -> Steps[bool]:
    """Reads white space and one of ``closing``; if something else comes, the white space is content."""
    reader.hold()
    yield from reader.space()
    for text in closing:
        if (yield from reader.closing(text)):
            reader.drop()
            return True
    sink.content(reader.release())
    return False


def read_name(reader: Reader) -> Steps[str | None]:
    """Reads a function's name; None where there is none."""
    return (yield from reader.word(_LONGEST_NAME))


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _nothing(_text: str) -> None:
    pass
