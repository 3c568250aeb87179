"""Texts of models, each read once however often it is asked for, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from tercet_frontend.tokenizing import ModelText
from tercet_shared.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

AT_ONCE = 2
"""Checkpoints that are opened or read at a time."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedModel:
    """A checkpoint as the front end needs it.

    Attributes:
        text: of it.
        tokenizer_fingerprint: of its tokenizer.
        name: of the checkpoint itself.
        place: where it is on this machine.
    """

    text: ModelText
    tokenizer_fingerprint: str
    name: str
    place: str


class TextLibrary:
    """Reads checkpoints. What nobody holds any more is forgotten; what somebody holds is handed out again.

    Args:
        read: makes the text of a checkpoint; blocks, and runs in a thread.
    """

    def __init__(self, read: Callable[[Checkpoint], ModelText] = ModelText.read) -> None:
        self._read = read
        self._kept: WeakValueDictionary[str, LoadedModel] = WeakValueDictionary()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, source: str, revision: str | None = None) -> LoadedModel:
        """Returns the model of ``source``, which may have to be fetched from the hub.

        Raises:
            CheckpointError: there is none, or it cannot be read.
            ConfigurationError: the parsers that were asked for do not exist.
        """
        async with self._turns:
            checkpoint = await _apart(lambda: Checkpoint.open(source, revision=revision or None, text_only=True))
            place = await _apart(lambda: str(checkpoint.source.path.resolve()))
            # One place may be asked for by several names at once.
            lock = self._reading.setdefault(place, asyncio.Lock())
            async with lock:
                found = self._kept.get(place)
                if found is None:
                    found = await _apart(lambda: self._loaded(checkpoint, place))
                    self._kept[place] = found
                return found

    def _loaded(self, checkpoint: Checkpoint, place: str) -> LoadedModel:
        text = self._read(checkpoint)
        return LoadedModel(text, text.tokenizer.fingerprint, checkpoint.served_name, place)


async def _apart(work: Callable[[], T]) -> T:
    """Returns what ``work`` returns. Its thread does not keep the process from its end: a download may take hours."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # a result of ``work`` where there is no error

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised where this is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="model", daemon=True).start()
    return await done
