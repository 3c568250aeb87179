"""Llama 3.2 and 4, and relatives: ``[f(a=1, b="x"), g()]``, calls as Python writes them.

Only the beginning of the answer can be calls, and only of functions that the request offers. Arguments become JSON:
literals are converted one after the other, strings when they are complete.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

from tercet_frontend.parsing.tools.base import ToolFormat, begin_call, read_close, read_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.parsing.reader import Emit, Reader, Steps
    from tercet_frontend.parsing.sink import Sink

START, END = "<|python_start|>", "<|python_end|>"

_DEEPEST = 64
"""Nesting of one argument; what is deeper is not read."""

_LONGEST_ARGUMENT, _LONGEST_SCALAR = 256, 400
"""Characters of an argument's name, and of a number."""

_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][+-]?\d+)?")
_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(\n|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"',
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip


class Pythonic(ToolFormat):
    """See the module."""

    name = "pythonic"
    markers = (START, END)

    def read(self, reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[None]:
        """Reads the answer."""
        reader.hold()
        yield from reader.space()
        yield from reader.literal(START)
        yield from reader.space()
        if (yield from reader.literal("[")) and (yield from _read_calls(reader, sink, offered)):
            yield from read_close(reader, sink, END)
        else:
            sink.content(reader.release())
        yield from reader.rest(sink.content)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns calls with their arguments as Python writes them, or as they are where they are no JSON."""
        return f"[{', '.join(f'{name}({_python(arguments)})' for name, arguments in calls)}]"


def _python(arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(values, dict):
        return arguments
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _read_calls(reader: Reader, sink: Sink, offered: frozenset[str]) -> Steps[bool]:
    """Reads calls and the closing bracket; returns whether there was one. Then nothing is held any more."""
    begun = False
    while True:
        yield from reader.space()
        if begun and (yield from reader.literal("]")):
            reader.drop()
            return True
        name = yield from read_name(reader)
        if name is None or name not in offered or not (yield from reader.literal("(")):
            if begun:
                sink.content(reader.release())
            return begun
        begun = True
        begin_call(reader, sink, name)
        if not (yield from _read_arguments(reader, sink.arguments)):
            return True
        reader.hold()
        yield from reader.space()
        if (yield from reader.literal("]")):
            reader.drop()
            return True
        if not (yield from reader.literal(",")):
            sink.content(reader.release())
            return True


def _read_arguments(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads ``a=1, b=2)`` as a JSON object; returns whether it was complete."""
    emit("{")
    separator = ""
    while True:
        yield from reader.space()
        if (yield from reader.literal(")")):
            emit("}")
            return True
        name = yield from reader.word(_LONGEST_ARGUMENT)
        yield from reader.space()
        if name is None or not (yield from reader.literal("=")):
            return False
        emit(f"{separator}{json.dumps(name)}: ")
        separator = ", "
        if not (yield from _read_value(reader, emit, 0)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(",")) and (yield from reader.peek()) != ")":
            return False


def _read_value(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
    """Reads one literal as JSON; returns whether it was complete."""
    yield from reader.space()
    char = yield from reader.peek()
    if depth > _DEEPEST or not char:
        return False
    if char in "'\"":
        return (yield from _read_string(reader, emit))
    if char in "[(":
        return (yield from _read_sequence(reader, emit, depth))
    if char == "{":
        return (yield from _read_dict(reader, emit, depth))
    text = yield from reader.scalar(_LONGEST_SCALAR)
    value = _WORDS.get(text) or _number(text)
    if value is None:
        return False
    emit(value)
    return True


def _read_sequence(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
    closing = "]" if (yield from reader.any_of("[", "(")) == "[" else ")"
    emit("[")
    separator = ""
    while True:
        yield from reader.space()
        if (yield from reader.literal(closing)):
            emit("]")
            return True
        emit(separator)
        separator = ", "
        if not (yield from _read_value(reader, emit, depth + 1)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(",")) and (yield from reader.peek()) != closing:
            return False


def _read_dict(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
    yield from reader.literal("{")
    emit("{")
    separator = ""
    while True:
        yield from reader.space()
        if (yield from reader.literal("}")):
            emit("}")
            return True
        if (yield from reader.peek()) not in ("'", '"'):
            return False
        emit(separator)
        separator = ", "
        if not (yield from _read_string(reader, emit)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(":")):
            return False
        emit(": ")
        if not (yield from _read_value(reader, emit, depth + 1)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(",")) and (yield from reader.peek()) != "}":
            return False


def _read_string(reader: Reader, emit: Emit) -> Steps[bool]:
    quote = yield from reader.any_of('"""', "'''", '"', "'")
    pieces: list[str] = []
    complete = yield from reader.quoted(quote, pieces.append)
    value = _ESCAPE.sub(_unescaped, "".join(pieces))
    # JSON may write one character as two escapes; alone, either of them is no text.
    value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    written = json.dumps(value, ensure_ascii=False)
    emit(written if complete else written[:-1])
    return complete


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if escape in _ESCAPES:
        return _ESCAPES[escape]
    if escape[0] in "xuU":
        code = int(escape[1:], 16) if len(escape) > 1 else 0x110000
        return chr(code) if code < 0x110000 else match[0]
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    return match[0]


def _number(text: str) -> str | None:
    """Returns a Python number as JSON writes it."""
    if _NUMBER.fullmatch(text) is None:
        return None
    text = text.replace("_", "").lstrip("+")
    try:
        value = int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None
