"""Choices while they are generated: merging, stop strings, failures, and that nothing is left running."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tercet_frontend.api.answers import Detail, Ending, PromptDetail
from tercet_frontend.api.choices import Choice, Choices, DetailRecorder
from tercet_frontend.cores.interface import Finished, FinishReason, Start, TokenLogProbs, Tokens
from tercet_frontend.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tercet_frontend.text import Detokenizer, TextStream
from tercet_shared.errors import InternalError, TercetError, UnavailableError

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


def said(events: Sequence[Event]) -> str:
    """The text of an answer without a parser: at most one piece of content."""
    assert len(events) <= 1
    assert all(isinstance(event, Content) and event.text for event in events)
    return "".join(event.text for event in events if isinstance(event, Content))


async def collect(choices: Choices) -> list[str]:
    texts = [""] * len(choices.all)
    async with asyncio.timeout(60), choices:
        while choices.running:
            for choice, tokens in await choices.next():
                texts[choice.index] += said(choice.take(tokens))
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
            found = ""
            if first_end is not None:
                found = max((string for string in stop if whole[:first_end].endswith(string)), key=len)
                cut = whole[: first_end - len(found)]
            assert text == cut
            assert choice.ending == Ending("stop", None if first_end is None else found, choice.output_tokens)
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
    assert batch[0].take(batch[1]) == [Content("ab")]


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
            assert choice.take(tokens) == [Content("abc")]


class LetterParser:
    """A parser for tests: ``g`` begins a call, whose arguments are what follows up to ``h``; ``e`` is held back."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.stopped: bool | None = None
        self._held = ""
        self._inside = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for char in self._held + text:
            if char == "g":
                events.append(ToolCallBegin(self.num_calls, f"call-{self.num_calls}", "f"))
                self.num_calls += 1
                self._inside = True
            elif char == "h":
                self._inside = False
            elif self._inside:
                events.append(ToolCallArguments(self.num_calls - 1, char))
            elif char == "f":
                events.append(Reasoning(char))
            elif char != "e":
                events.append(Content(char))
        self._held = "e" if text.endswith("e") else ""
        return events

    def finish(self, *, stopped: bool) -> list[Event]:
        self.stopped = stopped
        return [Content(self._held)] if self._held else []


def single(**options: Any) -> tuple[Choice, FakeGeneration, LetterParser]:
    generation, parser = FakeGeneration(), LetterParser()
    stream = TextStream(DETOKENIZER, [0], stop=options.pop("stop", ()), spans="recorder" in options)
    return Choice(0, generation, stream, parser=parser, **options), generation, parser


@pytest.mark.parametrize(
    ("text", "finished", "reason", "stopped"),
    [
        ("ab", _END, "stop", True),
        ("agb", _END, "tool_calls", True),
        ("agb", Finished(FinishReason.LENGTH, None, 0), "length", False),
        ("ab", Finished(FinishReason.LENGTH, None, 0), "length", False),
    ],
)
def test_a_parser_decides_about_tool_calls(text: str, finished: Finished, reason: str, stopped: bool) -> None:
    choice, _, parser = single()
    events = choice.take(Tokens(ids(text), finished))
    assert ToolCallBegin(0, "call-0", "f") in events or "g" not in text
    assert choice.ending == Ending(reason, None, len(text))
    assert parser.stopped is stopped


def test_a_stop_string_is_no_end_of_the_model() -> None:
    choice, generation, parser = single(stop=("bc",))
    assert choice.take(Tokens(ids("abcd"), None)) == [Content("a")]
    assert choice.ending == Ending("stop", "bc", 3)
    assert parser.stopped is False
    assert generation.finished_at == 3


def test_what_a_parser_holds_back_comes_at_the_end() -> None:
    choice, _, _ = single()
    assert choice.take(Tokens(ids("ae"), None)) == [Content("a")]
    assert choice.take(Tokens([], _END)) == [Content("e")]


def test_a_stop_token_is_named_only_if_it_was_asked_for() -> None:
    for named, stop in (((3,), 3), ((), None)):
        choice = Choice(0, FakeGeneration(), TextStream(DETOKENIZER, [0]), stop_ids=named)
        assert choice.take(Tokens(ids("ad"), Finished(FinishReason.STOP, 3, 0))) == [Content("a")]
        assert choice.ending == Ending("stop", stop, 2)


def test_an_abort_of_the_core_is_an_error() -> None:
    choice = Choice(0, FakeGeneration(), TextStream(DETOKENIZER, [0]))
    with pytest.raises(UnavailableError):
        choice.take(Tokens([], Finished(FinishReason.ABORT, None, 0)))
    assert choice.ending is None


def values(*logprobs: float) -> list[TokenLogProbs]:
    return [TokenLogProbs(logprob, 1, [], []) for logprob in logprobs]


def test_log_probabilities_come_with_their_text() -> None:
    stream = TextStream(DETOKENIZER, [0], stop=("cde",), spans=True)
    choice = Choice(0, FakeGeneration(), stream, recorder=DetailRecorder())
    assert choice.take(Tokens(ids("abc"), None, values(-1, -2, -3))) == [Content("ab")]
    first = choice.take_detail()
    assert first == Detail([0, 1], [b"a", b"b"], [0, 1], values(-1, -2), 3)
    assert choice.take(Tokens(ids("d"), None, values(-4))) == []
    assert choice.take(Tokens(ids("a"), None, values(-5))) == [Content("cda")]
    assert choice.take_detail() == Detail([2, 3, 0], [b"c", b"d", b"a"], [2, 3, 4], values(-3, -4, -5), 5)
    # What is behind the stop string in the same batch was not used; the stop string itself was, and has no bytes.
    assert choice.take(Tokens(ids("bcdeff"), None, values(*range(-11, -5)))) == [Content("b")]
    assert choice.take_detail() == Detail(
        [1, 2, 3, 4], [b"b", b"", b"", b""], [5, 6, 6, 6], values(-11, -10, -9, -8), 9
    )
    assert choice.take(Tokens(ids("a"), _END, values(-1))) == ()


def test_tokens_wait_for_an_event_to_go_with() -> None:
    choice, _, _ = single(recorder=DetailRecorder())
    assert choice.take(Tokens(ids("e"), None)) == []
    assert choice.take(Tokens(ids("fe"), None)) == [Reasoning("f")]
    detail = choice.take_detail()
    assert detail is not None
    assert detail.ids == ids("efe")
    assert choice.take(Tokens([*ids("a"), 7], Finished(FinishReason.STOP, 7, 0))) == [Content("a")]
    last = choice.take_detail()
    assert last == Detail([0, 7], [b"a", b""], [3, 4], None, 5)


def test_the_prompt_comes_with_the_first_detail() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    stream = TextStream(DETOKENIZER, prompt, spans=True)
    choice = Choice(0, FakeGeneration(), stream, recorder=DetailRecorder(prompt, prompt_logprobs=True))
    choice.take(Tokens(ids("a"), None, None, Start(2, values(-1, -2))))
    first = choice.take_detail()
    assert first is not None
    assert first.prompt == PromptDetail(prompt, values(-1, -2))
    assert choice.cached_tokens == 2
    choice.take(Tokens(ids("a"), None))
    second = choice.take_detail()
    assert second is not None
    assert second.prompt is None


def test_log_probabilities_of_the_prompt_may_not_be_missing() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    stream = TextStream(DETOKENIZER, prompt, spans=True)
    choice = Choice(0, FakeGeneration(), stream, recorder=DetailRecorder(prompt, prompt_logprobs=True))
    with pytest.raises(InternalError, match="log-probabilities"):
        choice.take(Tokens(ids("a"), None, None, Start(0, values(-1))))


@pytest.mark.parametrize("finished", [None, _END])
def test_scoring_drops_what_is_generated(finished: Finished | None) -> None:
    prompt = np.array([1, 2], np.int32)
    generation = FakeGeneration()
    stream = TextStream(DETOKENIZER, prompt, spans=True)
    choice = Choice(0, generation, stream, recorder=DetailRecorder(prompt), score_only=True)
    assert choice.take(Tokens(ids("a"), finished)) == ()
    assert choice.ending == Ending("length", None, 0)
    assert generation.finished_at == (0 if finished is None else None)
    assert choice.take_detail() == Detail(prompt=PromptDetail(prompt, None))
