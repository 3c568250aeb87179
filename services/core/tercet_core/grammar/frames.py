"""Frames between the core and a process that tries grammars out: four bytes of length, then MessagePack."""

from __future__ import annotations

from typing import IO, Any

import msgpack

_LENGTH = 4
READY = "ready"
"""What the process says once it has the tokenizer."""


def pack(message: object) -> bytes:
    """Returns a message as a frame."""
    body = msgpack.packb(message)
    return len(body).to_bytes(_LENGTH, "little") + bytes(body)


def read(stream: IO[bytes]) -> Any:
    """Waits for a frame and returns its message. Raises `EOFError` at the end of the stream."""
    head = stream.read(_LENGTH)
    if len(head) < _LENGTH:
        raise EOFError
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return msgpack.unpackb(body)
