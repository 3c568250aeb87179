"""What a command prints, when whoever reads it has had enough (``tercet serve --help | head``)."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def while_it_is_read() -> Iterator[None]:
    """Ends the block, not the command with a traceback, as soon as nothing reads standard output any more.

    What was printed is flushed at the end of the block; after it, standard output is a void if its reader left.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes the stream once more at its end.
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, sys.stdout.fileno())
        os.close(void)
