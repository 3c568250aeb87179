"""What a command prints, when whoever reads it has had enough (``tercet serve --help | head``)."""

from __future__ import annotations

import os
import select
import sys
from contextlib import contextmanager
from io import UnsupportedOperation
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def while_it_is_read() -> Iterator[None]:
    """Ends the block, not the command with a traceback, as soon as nothing reads standard output any more.

    What was printed is flushed at the end of the block; after it, standard output is a void if its reader left.

    Raises:
        BrokenPipeError: something else was not read to its end.
    """
    try:
        yield
        flush()
    except BrokenPipeError:
        if not _left():
            raise
        # The interpreter flushes the stream once more at its end.
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, sys.stdout.fileno())
        os.close(void)


def flush() -> None:
    """Hands over what was printed so far; a process may have been started without standard output."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _left() -> bool:
    """Whether nothing can read standard output any more."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, UnsupportedOperation):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))
