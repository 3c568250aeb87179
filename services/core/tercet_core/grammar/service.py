"""Grammars as the engine sees them: a guide for a request, and the work of guides off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tercet_core.grammar.compiler import GrammarCompiler
from tercet_core.grammar.guide import GrammarGuide
from tercet_core.grammar.masks import Masks
from tercet_core.grammar.numbers import may_hold_numbers
from tercet_core.grammar.threads import in_deep_thread
from tercet_core.grammar.vocabulary import read_vocabulary
from tercet_shared.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from tercet_core.grammar.vocabulary import Vocabulary
    from tercet_core.scheduling.guides import Guide, GuideWork
    from tercet_core.scheduling.request import Request
    from tercet_shared.structured import Grammar
    from tercet_shared.wire.step import WorkerHello


class GrammarService:
    """Everything about grammars of one core. Used on one event loop; `close` it. Nothing is read before the first use.

    Masks are computed on a thread of their own: a row takes 10 to 100 µs (vocabulary of 49,152, a JSON schema), so a
    full batch would keep the event loop, and with it every stream, for many milliseconds. The engine waits for it all
    the same; the hop costs it some 0.1 ms, while the device is busy with what does not need the mask.

    Args:
        model: what the worker was started with; None: grammars are refused.
        revision: of a hub model.
        hello: of the worker.
    """

    def __init__(self, model: str | None, revision: str | None, hello: WorkerHello) -> None:
        self._model = model
        self._revision = revision
        self._hello = hello
        self._compiler: asyncio.Task[tuple[Vocabulary, GrammarCompiler]] | None = None
        self._masks: Masks | None = None
        self._mask_thread = ThreadPoolExecutor(1, "masks")
        self._replay_threads = ThreadPoolExecutor(2, "grammar replay")

    async def guide(self, request: Request, grammar: Grammar) -> Guide:
        """Returns the guide of a request, which has taken the output of earlier attempts.

        Raises:
            InvalidRequestError: the grammar is refused, or the output so far does not follow it.
            OverloadedError: too many grammars wait to be compiled.
            InternalError: a fault of ours.
        """
        if self._model is None:
            raise InvalidRequestError(
                f"{grammar.param} cannot be enforced: this core was started without --model.", param=grammar.param
            )
        if self._compiler is None:
            self._compiler = asyncio.create_task(self._open(self._model), name="read the vocabulary")
        try:
            vocabulary, compiler = await asyncio.shield(self._compiler)
        except CheckpointError as error:
            raise InvalidRequestError(
                f"{grammar.param} cannot be enforced on this core: {error.message}", param=grammar.param
            ) from None
        matcher = await compiler.matcher(grammar, request.tenant)
        params = request.params
        stop_ids = params.eos_token_ids + params.stop_token_ids
        numbers = vocabulary.numbers if may_hold_numbers(grammar) else None
        guide = GrammarGuide(matcher, grammar, stop_ids=stop_ids, end_ids=vocabulary.end_ids, numbers=numbers)
        output = request.tokens[request.prompt_len :].tolist()
        await asyncio.get_running_loop().run_in_executor(self._replay_threads, guide.begin, output)
        if guide.error is not None:
            raise guide.error
        return guide

    async def compute(self, work: GuideWork) -> None:
        """Runs the work of guides."""
        if self._masks is None:
            self._masks = Masks()
        await asyncio.get_running_loop().run_in_executor(self._mask_thread, work.run, self._masks)

    async def close(self) -> None:
        """Ends everything that is under way."""
        self._mask_thread.shutdown(wait=False, cancel_futures=True)
        self._replay_threads.shutdown(wait=False, cancel_futures=True)
        task, self._compiler = self._compiler, None
        if task is None:
            return
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif task.exception() is None:
            await task.result()[1].close()

    async def _open(self, model: str) -> tuple[Vocabulary, GrammarCompiler]:
        hello = self._hello
        vocabulary = await in_deep_thread(
            lambda: read_vocabulary(
                model, self._revision, size=hello.vocab_size, fingerprint=hello.tokenizer_fingerprint
            ),
            "vocabulary",
        )
        return vocabulary, GrammarCompiler(vocabulary)
