"""Grammars compiled once: tried out in a process of its own, then compiled here, cached, and copied per request."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tercet_core.grammar.matchers import make_matcher
from tercet_core.grammar.proving import TRY_SECONDS, Prover
from tercet_core.grammar.threads import in_deep_thread
from tercet_core.grammar.turns import Turns
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
MAX_COMPILING_PER_TENANT: Final = 16
"""Those of one tenant."""
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
        max_per_tenant: those of one tenant.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        seconds: float = TRY_SECONDS,
        max_compiling: int = MAX_COMPILING,
        max_per_tenant: int = MAX_COMPILING_PER_TENANT,
    ) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._max_compiling = max_compiling
        self._max_per_tenant = max_per_tenant
        self._cache: OrderedDict[tuple[GrammarKind, str], _Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[tuple[GrammarKind, str], asyncio.Task[_Compiled]] = {}
        self._compiling_for: Counter[str] = Counter()
        self._turns = Turns(PROVERS)
        self._provers: list[Prover] = []
        self.tried = 0
        """Grammars that were not in the cache."""

    async def matcher(self, grammar: Grammar, tenant: str = "") -> LLMatcher:
        """Returns a matcher at the start of a grammar, for one request.

        Args:
            grammar: the request's.
            tenant: whose request it is; empty where nobody is known.

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
            compiled = await asyncio.shield(self._compiling.get(key) or self._begin(grammar, tenant))
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

    def _begin(self, grammar: Grammar, tenant: str) -> asyncio.Task[_Compiled]:
        limit = self._max_per_tenant if tenant else self._max_compiling
        if len(self._compiling) >= self._max_compiling or self._compiling_for[tenant] >= limit:
            raise OverloadedError("Too many grammars wait to be compiled; try again.")
        key = (grammar.kind, grammar.text)
        task = asyncio.create_task(self._compile(grammar, tenant), name="compile a grammar")

        def done(task: asyncio.Task[_Compiled]) -> None:
            del self._compiling[key]
            self._compiling_for[tenant] -= 1
            if not self._compiling_for[tenant]:
                del self._compiling_for[tenant]
            if not task.cancelled() and task.exception() is None:  # what failed for another reason is tried again
                self._keep(key, task.result())

        self._compiling[key] = task
        self._compiling_for[tenant] += 1
        task.add_done_callback(done)
        return task

    async def _compile(self, grammar: Grammar, tenant: str) -> _Compiled:
        self.tried += 1
        size = len(grammar.text)
        await self._turns.wait(tenant, size)
        try:
            translated = await self._prove(grammar)
        except InvalidRequestError as error:
            return _Compiled(None, error.message)
        finally:
            self._turns.leave(tenant, size)
        tokenizer = self._vocabulary.tokenizer
        try:
            matcher = await in_deep_thread(lambda: make_matcher(tokenizer, grammar, translated), "grammar")
        except InvalidRequestError as error:
            return _Compiled(None, error.message)
        return _Compiled(matcher)

    async def _prove(self, grammar: Grammar) -> str:
        prover = self._provers.pop() if self._provers else Prover(seconds=self._seconds)
        try:
            if not prover.usable:
                await prover.start(self._vocabulary)
            return await prover.translate(grammar)
        finally:
            if prover.usable:
                self._provers.append(prover)

    def _keep(self, key: tuple[GrammarKind, str], compiled: _Compiled) -> None:
        self._cache[key] = compiled
        self._cached_bytes += len(key[1])
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            (_, text), _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(text)
