"""Where one request stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_core.grammar.translate import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llguidance import LLMatcher

    from tercet_core.grammar.numbers import NumberLimit
    from tercet_shared.errors import TercetError
    from tercet_shared.structured import Grammar
    from tercet_shared.wire.step import U32


class GrammarGuide:
    """See `tercet_core.scheduling.guides.Guide`.

    What is forced is settled where a run of forced tokens begins, and follows from the tokens before it alone: a guide
    that takes the same output on another core forces the same.

    Args:
        matcher: at the start of the grammar; the guide's own.
        grammar: what errors are about.
        stop_ids: the tokens that the request's parameters let it end with.
        end_ids: the model's end-of-sequence ids.
        numbers: how long numbers in JSON become; None where there are none.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        *,
        stop_ids: Iterable[int],
        end_ids: tuple[int, ...],
        numbers: NumberLimit | None = None,
    ) -> None:
        self.matcher = matcher
        self._grammar = grammar
        self._stops = np.array(sorted(set(stop_ids)), np.int64)
        self._ends = np.array(sorted(set(end_ids)), np.int64)
        self._all_ends = np.union1d(self._stops, self._ends)
        self._end_ids = end_ids
        self._numbers = numbers
        self._tail = b" "  # of the output, for the numbers
        self._forced: list[int] = []
        self._error: TercetError | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence ids."""
        return self._end_ids

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must follow."""
        return self._forced

    @property
    def error(self) -> TercetError | None:
        """Why the request cannot go on."""
        return self._error

    @property
    def open(self) -> bool:
        """Whether what is allowed next must be computed: it is neither forced nor only the end."""
        return not self._forced and not self.matcher.is_stopped()

    def begin(self, output: list[int]) -> None:
        """Takes the output of earlier attempts, if any, and finds what is forced then."""
        self._force()
        self.advance(output)

    def advance(self, tokens: list[int]) -> None:
        """Takes tokens; see `Guide`."""
        if self._numbers is not None:
            self._tail = self._numbers.tail(self._tail, tokens)
        at = 0
        while at < len(tokens) and self._error is None:
            run = self._forced_run(tokens[at : at + len(self._forced)])
            if run:
                taken = self.matcher.consume_tokens(self._forced[:run])
                self._forced = self._forced[run:]
            else:  # without a choice another token may still be allowed, by a version that tokenizes in another way
                run, self._forced = 1, []
                taken = self.matcher.consume_token(tokens[at])
            at += run
            if not taken:
                self._fail(f"the output does not follow it: {self.matcher.get_error()}")
            elif not self._forced:
                self._force()

    def write_closed(self, words: U32) -> None:
        """Writes the mask ``[words]`` where `open` is false; it must be all zero."""
        if self._forced:
            words[self._forced[0] >> 5] = np.uint32(1 << (self._forced[0] & 31))
        else:
            _set(words, self._all_ends)

    def finish_open(self, words: U32) -> None:
        """Completes a mask ``[words]`` that the matcher has computed: how the request may end is its own affair."""
        if self.matcher.is_error():
            self._fail(self.matcher.get_error())
            return
        if self.matcher.is_accepting():
            _clear(words, self._ends)
            _set(words, self._stops)
            if not words.any():
                _set(words, self._all_ends)
        elif not words.any():
            self._fail("it allows no further token.")
        if self._numbers is not None:
            self._numbers.apply(self._tail, words)

    def _forced_run(self, tokens: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(tokens, self._forced, strict=False)) if a != b), len(tokens))

    def _force(self) -> None:
        if self.matcher.is_stopped():
            return
        self._forced = self.matcher.compute_ff_tokens()
        if self.matcher.is_error():
            self._fail(self.matcher.get_error())

    def _fail(self, reason: str) -> None:
        self._error = refused(self._grammar, reason)


def _set(words: U32, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    np.bitwise_or.at(words, ids >> 5, (1 << (ids & 31)).astype(np.uint32))


def _clear(words: U32, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    np.bitwise_and.at(words, ids >> 5, ~(1 << (ids & 31)).astype(np.uint32))
