"""Commands that forget that they were cancelled, as redis-py's may: see `raise_if_cancelled`."""

from __future__ import annotations

import asyncio
from typing import Any


class Deaf:
    """Anything that may be called with anything.

    Attributes:
        called: set while a call waits for its cancellation, after which it goes on as if nothing had been said.

    Args:
        answer: is returned then, or raised where it is an exception.
    """

    def __init__(self, answer: Any = None) -> None:
        self.called = asyncio.Event()
        self._answer = answer

    async def __call__(self, *_arguments: Any, **_more: Any) -> Any:
        self.called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if isinstance(self._answer, Exception):
                raise self._answer from None
        return self._answer
