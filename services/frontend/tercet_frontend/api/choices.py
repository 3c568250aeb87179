"""The choices of one request while they are generated: from token batches to events, endings and counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from tercet_frontend.api.answers import Detail, Ending, PromptDetail
from tercet_frontend.cores.interface import FinishReason
from tercet_frontend.parsing.events import Content, Reasoning
from tercet_frontend.text import TextDelta
from tercet_shared.errors import InternalError, TercetError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Container, Coroutine, Sequence
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.cores.interface import Finished, Generation, Start, TokenLogProbs, Tokens
    from tercet_frontend.parsing.events import Event, OutputParser
    from tercet_frontend.text import TextStream

TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of an answer that calls tools."""


class Choice:
    """One choice.

    Attributes:
        index: its number in the answer.
        output_tokens: so far, for usage: those of the stop string or end-of-sequence included.
        reasoning_tokens: those up to the end of the reasoning, its tags included.
        cached_tokens: prompt tokens that came from the prefix cache; known with the first token.
        ending: None until the choice has ended.
    """

    __slots__ = (
        "_generation",
        "_include_stop",
        "_parser",
        "_plain",
        "_recorder",
        "_score_only",
        "_stop_ids",
        "_text",
        "_waiting",
        "cached_tokens",
        "ending",
        "index",
        "output_tokens",
        "reasoning_tokens",
    )

    def __init__(
        self,
        index: int,
        generation: Generation,
        text: TextStream,
        *,
        parser: OutputParser | None = None,
        recorder: DetailRecorder | None = None,
        stop_ids: Container[int] = (),
        include_stop: bool = False,
        score_only: bool = False,
    ) -> None:
        """Takes what the choice is made of.

        Args:
            index: its number in the answer.
            generation: its tokens.
            text: makes text of them; with spans if there is a ``recorder``.
            parser: makes events of the text; None makes all of it content.
            recorder: keeps the tokens for `take_detail`.
            stop_ids: ids that are named when they end the choice.
            include_stop: the token that ends the choice may have text.
            score_only: it ends with the first token, which is dropped.
        """
        self.index = index
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.ending: Ending | None = None
        self._generation = generation
        self._text = text
        self._parser = parser
        self._recorder = recorder
        self._stop_ids = stop_ids
        self._include_stop = include_stop
        self._score_only = score_only
        self._plain = parser is None and recorder is None and not score_only and text.plain
        self._waiting: asyncio.Task[None] | None = None

    def waits_in(self, task: asyncio.Task[None]) -> None:
        """Says which task awaits `next`, so that it is ended before the generation is."""
        self._waiting = task

    def next(self) -> Coroutine[Any, Any, Tokens]:
        """Waits for tokens; cancelling loses nothing. Raises `TercetError` when the choice failed."""
        return self._generation.next()

    def take(self, tokens: Tokens) -> Sequence[Event]:
        """Returns what ``tokens`` complete, and notes the end if it came; after the end there is nothing.

        Raises:
            UnavailableError: the core gave the choice up.
        """
        if self.ending is not None:
            return ()
        finished = tokens.finished
        if self._plain and finished is None and tokens.start is None:
            # Most tokens of most streams.
            text = self._text.push_plain(tokens.ids)
            self.output_tokens += len(tokens.ids)
            return [Content(text)] if text else []
        if finished is not None and finished.reason is FinishReason.ABORT:
            raise UnavailableError("The generation was aborted by its core.")
        if tokens.start is not None:
            self._begin(tokens.start)
        if self._score_only:
            self._scored(finished)
            return ()
        delta = self._text.push(
            tokens.ids,
            finished=finished is not None,
            drop_last=finished is not None and finished.stop_id is not None and not self._include_stop,
        )
        self.output_tokens = delta.output_tokens
        if self._recorder is not None:
            self._recorder.add(tokens.ids, tokens.logprobs, delta)
        parser = self._parser
        events: list[Event]
        if parser is None:
            events = [Content(delta.text)] if delta.text else []
        else:
            events = parser.push(delta.text) if delta.text else []
        if finished is not None or delta.stopped_by is not None:
            if parser is not None:
                stopped = delta.stopped_by is None and finished is not None and finished.reason is FinishReason.STOP
                events += parser.finish(stopped=stopped)
            self._end(finished, delta)
        if parser is not None and any(isinstance(event, Reasoning) for event in events):
            self.reasoning_tokens = self.output_tokens
        return events

    def take_detail(self) -> Detail | None:
        """Returns the tokens that go with what `take` returned since the last call; None where they are not kept."""
        return None if self._recorder is None else self._recorder.take()

    def _begin(self, start: Start) -> None:
        self.cached_tokens = start.cached_tokens
        if self._recorder is not None:
            self._recorder.begin(start)

    def _scored(self, finished: Finished | None) -> None:
        if self._recorder is not None:
            self._recorder.add((), None, TextDelta("", None, 0))
        if finished is not None:
            self.cached_tokens = self.cached_tokens or finished.cached_tokens
        else:
            self._stop_waiting()
            self._generation.finish(0)
        self.ending = Ending(FinishReason.LENGTH.value, None, 0)

    def _end(self, finished: Finished | None, delta: TextDelta) -> None:
        reason, stop = FinishReason.STOP.value, delta.stopped_by
        if finished is not None:
            self.cached_tokens = self.cached_tokens or finished.cached_tokens
            if delta.stopped_by is None:
                reason = finished.reason.value
        calls = self._parser.num_calls if self._parser is not None else 0
        named = finished.stop_id if finished is not None and finished.stop_id in self._stop_ids else None
        self.ending = Ending(
            TOOL_CALLS if calls and reason == FinishReason.STOP.value else reason,
            named if stop is None else stop,
            delta.output_tokens,
        )
        if finished is None:
            self._stop_waiting()
            self._generation.finish(delta.output_tokens)

    def abort(self, reason: str) -> None:
        """Gives the choice up unless it has ended."""
        if self.ending is None:
            self._stop_waiting()
            self._generation.abort(reason)

    def _stop_waiting(self) -> None:
        # A generation that is finished or aborted has no further event, and must not be awaited any more.
        if self._waiting is not None:
            self._waiting.cancel()


class DetailRecorder:
    """Keeps the tokens of one choice until the events with their text are given out.

    Args:
        prompt_ids: int32[p], for jobs that ask for the prompt's detail; else None.
        prompt_logprobs: whether those of the prompt were asked for.
    """

    __slots__ = ("_detail", "_ids", "_logprobs", "_prompt_ids", "_prompt_logprobs", "_wants_prompt_logprobs")

    def __init__(self, prompt_ids: npt.NDArray[np.int32] | None = None, *, prompt_logprobs: bool = False) -> None:
        self._detail = Detail()
        self._ids: list[int] = []  # of which text is held back
        self._logprobs: list[TokenLogProbs] = []  # of them
        self._prompt_ids = prompt_ids
        self._prompt_logprobs: list[TokenLogProbs] | None = None
        self._wants_prompt_logprobs = prompt_logprobs

    def begin(self, start: Start) -> None:
        """Takes what came with the first token."""
        self._prompt_logprobs = start.prompt_logprobs

    def add(self, ids: Sequence[int], logprobs: list[TokenLogProbs] | None, delta: TextDelta) -> None:
        """Adds tokens, and moves those whose text is out to the next detail.

        Raises:
            InternalError: the core left out log-probabilities of the prompt.
        """
        self._ids += ids
        count = len(delta.spans)
        detail = self._detail
        detail.ids += self._ids[:count]
        del self._ids[:count]
        for raw, offset in delta.spans:
            detail.raw.append(raw)
            detail.offsets.append(offset)
        if logprobs is not None:
            self._logprobs += logprobs
            detail.logprobs = [*(detail.logprobs or ()), *self._logprobs[:count]]
            del self._logprobs[:count]
        detail.output_tokens = delta.output_tokens
        if self._prompt_ids is not None:
            self._add_prompt(self._prompt_ids)

    def take(self) -> Detail:
        """Returns the next detail."""
        detail, self._detail = self._detail, Detail(output_tokens=self._detail.output_tokens)
        return detail

    def _add_prompt(self, ids: npt.NDArray[np.int32]) -> None:
        self._prompt_ids = None
        if self._wants_prompt_logprobs and len(self._prompt_logprobs or ()) != len(ids) - 1:
            raise InternalError("The core left out log-probabilities of the prompt.")
        self._detail.prompt = PromptDetail(ids, self._prompt_logprobs)


class Choices:
    """All choices of a request. An async context manager: leaving it aborts what has not ended.

    A single choice is awaited directly. Of several, each has a task that puts its tokens into one basket, and whoever
    awaits `next` wakes up once for all that one engine step brought.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.all = choices
        self._basket: list[tuple[Choice, Tokens]] = []
        self._failure: TercetError | None = None
        self._filled = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    @property
    def only(self) -> Choice | None:
        """The choice of a request that has one; None where there are several."""
        return self.all[0] if len(self.all) == 1 else None

    @property
    def running(self) -> bool:
        """Whether a choice has not ended."""
        return any(choice.ending is None for choice in self.all)

    async def __aenter__(self) -> Self:
        if self.only is None:
            self._group = await asyncio.TaskGroup().__aenter__()
            for choice in self.all:
                choice.waits_in(self._group.create_task(self._collect(choice)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "the request failed" if isinstance(error, Exception) else "the client is gone"
        for choice in self.all:
            choice.abort(reason)
        if self._group is not None:
            # The error is the caller's and goes on as it is; the group would wrap it.
            await self._group.__aexit__(None, None, None)

    async def next(self) -> list[tuple[Choice, Tokens]]:
        """Waits until choices have tokens and returns them; cancelling loses nothing.

        Raises:
            TercetError: a choice failed, and with it the request.
        """
        only = self.only
        if only is not None:
            return [(only, await only.next())]
        await self._filled.wait()
        if self._failure is None:
            self._filled.clear()
        elif not self._basket:
            raise self._failure
        basket, self._basket = self._basket, []
        return basket

    async def _collect(self, choice: Choice) -> None:
        """Runs until the choice has ended, by its core or by a stop string."""
        last = False
        while not last and choice.ending is None:
            try:
                tokens = await choice.next()
            except TercetError as error:
                self._failure = error
                self._filled.set()
                return
            last = tokens.finished is not None
            self._basket.append((choice, tokens))
            self._filled.set()
