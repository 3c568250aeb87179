"""How much there is in a JSON text, told before it is parsed.

A parser makes an object of every list, dictionary, key and number, and lets nothing else run meanwhile: nine megabytes
of ``[],`` take it half a second, in which no stream moves. What is counted here is counted by NumPy, which lets other
threads run. Text costs a parser next to nothing and is not limited.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tercet_shared.errors import InvalidRequestError

UNCHECKED_BYTES: Final = 256 * 1024
"""Texts up to this size are parsed in some ten milliseconds, whatever they consist of."""

MAX_CONTAINERS: Final = 100_000
"""Lists and objects of one body."""

MAX_KEYS: Final = 100_000
"""Keys of all its objects."""

MAX_VALUES: Final = 500_000
"""Values of all its lists and objects: as many token ids as the longest prompt may have."""

_LIMITS: Final = (MAX_CONTAINERS, MAX_KEYS, MAX_VALUES)
_WORDS: Final = ("lists and objects", "keys", "values")

_PIECE: Final = 512 * 1024
"""Bytes that are read at a time."""


class Structure(NamedTuple):
    """What stands outside of strings.

    Attributes:
        containers: lists and objects that begin.
        keys: keys, by their colons.
        values: values, by the commas between them.
    """

    containers: int
    keys: int
    values: int


def structure_of(body: bytes | bytearray) -> Structure:
    """Returns the structure of a JSON text; what follows the first fault of one that is not valid counts somehow."""
    reader = _Reader()
    for begin in range(0, len(body), _PIECE):
        reader.add(np.frombuffer(body, np.uint8, min(_PIECE, len(body) - begin), begin))
    return reader.structure


def check_structure(body: bytes | bytearray) -> None:
    """Raises `InvalidRequestError` when the text has more in it than a request may have."""
    if len(body) <= UNCHECKED_BYTES:
        return
    reader = _Reader()
    for begin in range(0, len(body), _PIECE):
        reader.add(np.frombuffer(body, np.uint8, min(_PIECE, len(body) - begin), begin))
        for count, limit, what in zip(reader.structure, _LIMITS, _WORDS, strict=True):
            if count > limit:
                raise InvalidRequestError(f"The body has more than {limit} {what}.")


class _Reader:
    """Reads a text piece by piece: no step of NumPy shall take long, as few of them may keep others waiting."""

    def __init__(self) -> None:
        self.structure = Structure(0, 0, 0)
        self._inside = False  # of a string, at the end of what was read
        self._escaped = False  # the next character is

    def add(self, chars: npt.NDArray[np.uint8]) -> None:
        """Reads the next piece, uint8[n] with at least one character."""
        quotes = self._quotes(chars)
        # Modulo 256, so that a byte per character is enough: only the last bit is of interest.
        inside = np.cumsum(quotes, dtype=np.uint8)
        outside = (inside & 1) == self._inside

        def count(*wanted: str) -> int:
            return sum(int(np.count_nonzero(outside & (chars == ord(char)))) for char in wanted)

        containers, keys, values = self.structure
        self.structure = Structure(containers + count("[", "{"), keys + count(":"), values + count(","))
        self._inside ^= bool(inside[-1] & 1)

    def _quotes(self, chars: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Returns bool[n]: whether a quotation mark begins or ends a string there."""
        marks: npt.NDArray[np.bool_] = chars == ord('"')
        begins_escaped, self._escaped = self._escaped, False
        backslashes = np.flatnonzero(chars == ord("\\")).astype(np.int32)
        if begins_escaped and chars[0] != ord("\\"):
            marks[0] = False
        if len(backslashes):
            # Of a run of backslashes every second one is escaped itself; so what follows an odd number is.
            runs = np.flatnonzero(np.diff(backslashes) != 1)
            first = backslashes[np.concatenate(([0], runs + 1))]
            if begins_escaped and first[0] == 0:
                first[0] = 1  # the one there is escaped; where the run was no longer, none is left of it
            last = backslashes[np.concatenate((runs, [len(backslashes) - 1]))]
            after = last[(last - first) % 2 == 0] + 1
            self._escaped = len(after) > 0 and after[-1] == len(chars)
            marks[after[: len(after) - self._escaped]] = False
        return marks
