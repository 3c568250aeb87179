"""Native code that needs a deep stack, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STACK_BYTES: Final = 512 * 1024 * 1024
"""Of address space, not of memory. The compiler recurses along a grammar: about 10 KB for each reference of a chain,
and a grammar of the largest size has room for a chain of some thousands."""

_starting = threading.Lock()


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """Runs ``work`` on a daemon thread of its own with a deep stack."""
    with _starting:  # the size is a setting of the whole process
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


async def in_deep_thread(work: Callable[[], T], name: str) -> T:
    """Returns what ``work`` returns or raises, computed on a thread of its own, so that its stack is freed afterwards.

    When the caller is cancelled the thread goes on and its result is dropped; it does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # raised again where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    start(run, name)
    return await outcome
