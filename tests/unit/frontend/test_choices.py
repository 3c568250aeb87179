"""Choices while they are generated: merging, stop strings, failures, and that nothing is left running."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tercet_frontend.api.choices import Choice, Choices
from tercet_frontend.cores.interface import Finished, FinishReason, Tokens
from tercet_frontend.text import Detokenizer, TextStream
from tercet_shared.errors import InternalError, TercetError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALPHABET = "abcdefgh"
_END = Finished(FinishReason.STOP, None, 3)


def _detokenizer() -> Detokenizer:
    """One token per letter."""
    backend = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(_ALPHABET)}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return Detokenizer(backend)


DETOKENIZER = _detokenizer()


class FakeGeneration:
    """A generation whose events the test puts in; as strict as the real one about calls after its end."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Tokens | TercetError] = asyncio.Queue()
        self.finished_at: int | None = None
        self.aborted: str | None = None
        self._over = False
        self._awaited = False

    def put(self, *events: Tokens | TercetError) -> None:
        for event in events:
            self._events.put_nowait(event)

    async def next(self) -> Tokens:
        assert not self._over
        assert not self._awaited
        self._awaited = True
        try:
            event = await self._events.get()
        finally:
            self._awaited = False
        assert not self._over, "it was awaited after it had been ended"
        if isinstance(event, TercetError):
            self._over = True
            raise event
        self._over = event.finished is not None
        return event

    def finish(self, output_tokens: int) -> None:
        self._over = True
        self.finished_at = output_tokens

    def abort(self, reason: str) -> None:
        self._over = True
        self.aborted = reason


def ids(text: str) -> list[int]:
    return [_ALPHABET.index(letter) for letter in text]


def make(count: int, stop: Sequence[str] = ()) -> tuple[Choices, list[FakeGeneration]]:
    generations = [FakeGeneration() for _ in range(count)]
    return Choices(
        [
            Choice(index, generation, TextStream(DETOKENIZER, [0], stop=stop))
            for index, generation in enumerate(generations)
        ]
    ), generations


async def collect(choices: Choices) -> list[str]:
    texts = [""] * len(choices.all)
    async with asyncio.timeout(20), choices:
        while choices.running:
            for choice, tokens in await choices.next():
                texts[choice.index] += choice.take(tokens)
    return texts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.text(_ALPHABET, max_size=4), max_size=5), min_size=1, max_size=4),
    st.sampled_from([(), ("cd",), ("a", "bc")]),
)
def test_choices_end_as_if_each_were_alone(answers: list[list[str]], stop: tuple[str, ...]) -> None:
    async def run() -> None:
        choices, generations = make(len(answers), stop)
        for generation, pieces in zip(generations, answers, strict=True):
            generation.put(*(Tokens(ids(piece), None) for piece in pieces), Tokens([], _END))
        texts = await collect(choices)
        for text, pieces, generation, choice in zip(texts, answers, generations, choices.all, strict=True):
            whole = cut = "".join(pieces)
            # The stop string that is complete first counts; of those that are complete there, the longest.
            first_end = min((whole.index(string) + len(string) for string in stop if string in whole), default=None)
            if first_end is not None:
                found = max((string for string in stop if whole[:first_end].endswith(string)), key=len)
                cut = whole[: first_end - len(found)]
            assert text == cut
            assert choice.finish_reason == "stop"
            assert choice.output_tokens == (len(whole) if first_end is None else first_end)
            assert generation.aborted is None
            assert generation.finished_at == first_end

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 3])
async def test_one_failure_ends_all(count: int) -> None:
    choices, generations = make(count)
    generations[0].put(Tokens(ids("ab"), None), InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await collect(choices)
    assert all(generation.aborted for generation in generations[1:])


async def test_what_came_before_a_failure_is_given_out() -> None:
    choices, generations = make(2)
    generations[0].put(Tokens(ids("ab"), None), InternalError("broken"))
    async with choices:
        (batch,) = await choices.next()
        with pytest.raises(InternalError):
            await choices.next()
    assert batch[0].take(batch[1]) == "ab"


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_aborts_what_runs(count: int) -> None:
    choices, generations = make(count)
    generations[0].put(Tokens([], _END))

    async def fail_after_the_first_batch() -> None:
        async with choices:
            ((choice, tokens),) = await choices.next()
            choice.take(tokens)
            raise KeyError

    with pytest.raises(KeyError):
        await fail_after_the_first_batch()
    assert [generation.aborted for generation in generations] == [None] + ["the request failed"] * (count - 1)


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelling_aborts_all(count: int) -> None:
    choices, generations = make(count)
    task = asyncio.create_task(collect(choices))
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [generation.aborted for generation in generations] == ["the client is gone"] * count


async def test_one_wake_up_for_what_one_step_brought() -> None:
    choices, generations = make(4)
    async with choices:
        waiting = asyncio.create_task(choices.next())
        await asyncio.sleep(0)
        for generation in generations:
            generation.put(Tokens(ids("a"), None))
        assert len(await waiting) == 4


async def test_waiting_may_be_cancelled_without_loss() -> None:
    for count in (1, 2):
        choices, generations = make(count)
        async with choices:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await choices.next()
            generations[0].put(Tokens(ids("abc"), None))
            ((choice, tokens),) = await choices.next()
            assert choice.take(tokens) == "abc"
