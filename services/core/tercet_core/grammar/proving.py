"""The core's side of the processes that try grammars out; see `prover`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, Final

from tercet_core.grammar.frames import READY, pack, read
from tercet_core.grammar.threads import in_deep_thread
from tercet_core.grammar.translate import refused
from tercet_shared.errors import InternalError, InvalidRequestError
from tercet_shared.lifecycle import child

if TYPE_CHECKING:
    from tercet_core.grammar.vocabulary import Vocabulary
    from tercet_shared.structured import Grammar

TRY_SECONDS: Final = 10.0
"""Seconds that translating and compiling one grammar may take."""
START_SECONDS: Final = 120.0
"""Seconds that a process may take to start, on a machine that is busy."""


class Prover:
    """One process. It tries one grammar at a time; `start` it before use, and `close` it."""

    def __init__(self, *, seconds: float = TRY_SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def usable(self) -> bool:
        """Whether it can be given a grammar."""
        return self._process is not None and self._process.poll() is None

    async def start(self, vocabulary: Vocabulary) -> None:
        """Starts the process and gives it the tokenizer. Raises `InternalError` when that fails."""
        # Not through asyncio: on its loop children are forked, and gRPC has handlers that run then. And on this thread:
        # the process ends with the thread that started it.
        command = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
        command += [sys.executable, "-m", "tercet_core.grammar.prover"]
        try:
            self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE)  # noqa: ASYNC220  # see above
            async with asyncio.timeout(START_SECONDS):
                answer = await self._ask([vocabulary.text, vocabulary.size, list(vocabulary.end_ids)])
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            raise InternalError(f"The process that tries grammars out cannot be started: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if answer != READY:
            raise AssertionError("the process answered before it was asked")

    async def translate(self, grammar: Grammar) -> str:
        """Returns a grammar that can be compiled, as llguidance takes it; afterwards it may be that it is not `usable`.

        Raises:
            InvalidRequestError: the grammar is wrong, or asks for more than it may.
        """
        try:
            async with asyncio.timeout(self._seconds):
                fine, text = await self._ask([grammar.kind.value, grammar.text, grammar.param])
        except TimeoutError:
            await self.close()
            raise refused(grammar, f"compiling it takes longer than {self._seconds:g} s.") from None
        except (OSError, EOFError):
            await self.close()
            raise refused(grammar, "it is too complex to be compiled.") from None
        except asyncio.CancelledError:
            await self.close()  # what it answers later must not be taken for another answer
            raise
        if not fine:
            raise InvalidRequestError(text, param=grammar.param)
        return str(text)

    async def close(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await in_deep_thread(process.wait, "prover")
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # of what it did not read any more
                        pipe.close()

    async def _ask(self, message: object) -> Any:
        """Returns the answer to a message. When the caller gives up, `close` ends the thread that waits."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise AssertionError("a prover that was not started")
        sink, source = process.stdin, process.stdout

        def exchange() -> Any:
            sink.write(pack(message))
            sink.flush()
            return read(source)

        return await in_deep_thread(exchange, "prover")
