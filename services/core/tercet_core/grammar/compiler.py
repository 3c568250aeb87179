"""Grammars compiled once: tried out in a process of its own, then compiled here, cached, and copied per request."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tercet_core.grammar.matchers import make_matcher
from tercet_core.grammar.proving import TRY_SECONDS, Prover
from tercet_core.grammar.threads import in_deep_thread
from tercet_shared.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from tercet_core.grammar.vocabulary import Vocabulary
    from tercet_shared.structured import Grammar, GrammarKind

MAX_CACHED: Final = 512
"""Grammars that are kept compiled."""
MAX_CACHED_BYTES: Final = 2 << 20
"""Bytes of their texts. Compiled, a large one takes up to two hundred times as much."""
MAX_COMPILING: Final = 64
"""Grammars that are being compiled or wait for it; more are turned away."""
PROVERS: Final = 2
"""Processes that try grammars out: one grammar that takes all of its time does not hold up everybody else."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What came of a grammar: a matcher at its start, or why it was refused."""

    matcher: LLMatcher | None
    reason: str = ""


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Used on one event loop; `close` it.

    Args:
        vocabulary: the tokenizer.
        seconds: that trying one grammar out may take.
        max_compiling: grammars that may be in work or wait.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, seconds: float = TRY_SECONDS, max_compiling: int = MAX_COMPILING
    ) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._max_compiling = max_compiling
        self._cache: OrderedDict[tuple[GrammarKind, str], _Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[tuple[GrammarKind, str], asyncio.Task[_Compiled]] = {}
        self._free = asyncio.Semaphore(PROVERS)
        self._provers: list[Prover] = []
        self.tried = 0
        """Grammars that were not in the cache."""

    async def matcher(self, grammar: Grammar) -> LLMatcher:
        """Returns a matcher at the start of a grammar, for one request.

        Raises:
            InvalidRequestError: the grammar is wrong, or asks for more than it may.
            OverloadedError: too many grammars wait to be compiled.
            InternalError: no process can be started.
        """
        key = (grammar.kind, grammar.text)
        compiled = self._cache.get(key)
        if compiled is not None:
            self._cache.move_to_end(key)
        else:
            compiled = await asyncio.shield(self._compiling.get(key) or self._begin(grammar))
        if compiled.matcher is None:
            raise InvalidRequestError(compiled.reason, param=grammar.param)
        return compiled.matcher.deep_copy()

    async def close(self) -> None:
        """Ends everything that is under way; those who wait for it are cancelled."""
        tasks = [*self._compiling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        provers, self._provers = self._provers, []
        for prover in provers:
            await prover.close()

    def _begin(self, grammar: Grammar) -> asyncio.Task[_Compiled]:
        if len(self._compiling) >= self._max_compiling:
            raise OverloadedError("Too many grammars wait to be compiled; try again.")
        key = (grammar.kind, grammar.text)
        task = asyncio.create_task(self._compile(grammar), name="compile a grammar")

        def done(task: asyncio.Task[_Compiled]) -> None:
            del self._compiling[key]
            if not task.cancelled() and task.exception() is None:  # what failed for another reason is tried again
                self._keep(key, task.result())

        self._compiling[key] = task
        task.add_done_callback(done)
        return task

    async def _compile(self, grammar: Grammar) -> _Compiled:
        self.tried += 1
        async with self._free:
            prover = self._provers.pop() if self._provers else Prover(seconds=self._seconds)
            try:
                if not prover.usable:
                    await prover.start(self._vocabulary)
                translated = await prover.translate(grammar)
            except InvalidRequestError as error:
                return _Compiled(None, error.message)
            finally:
                if prover.usable:
                    self._provers.append(prover)
        tokenizer = self._vocabulary.tokenizer
        try:
            matcher = await in_deep_thread(lambda: make_matcher(tokenizer, grammar, translated), "grammar")
        except InvalidRequestError as error:
            return _Compiled(None, error.message)
        return _Compiled(matcher)

    def _keep(self, key: tuple[GrammarKind, str], compiled: _Compiled) -> None:
        self._cache[key] = compiled
        self._cached_bytes += len(key[1])
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            (_, text), _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(text)
