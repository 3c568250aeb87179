"""What passes between the choices of a request and the shape of its answer: the contract of everything that answers.

An endpoint makes a `Job` that names its `AnswerShape`; `GenerationResponse` runs it and calls the shape. Chat, plain
completions and every other kind of answer differ in nothing but their shapes (and in how they make the job).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tercet_frontend.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from tercet_frontend.cores.interface import TokenLogProbs
    from tercet_frontend.parsing.events import Event, OutputParser
    from tercet_shared.errors import TercetError


class ParserFactory(Protocol):
    """Makes the parser of each choice of a job."""

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """Special tokens whose text the parser must see though special tokens are skipped."""

    def __call__(self) -> OutputParser:
        """Returns a new parser, for one choice."""


@dataclass(slots=True)
class Detail:
    """The tokens whose text is in the events that it comes with; made only for jobs that ask for it.

    A token comes with the events that carry the last of its text, and every output token that counts in the usage comes
    exactly once, in order. All columns are as long as ``ids``.

    Attributes:
        ids: int[t] output tokens.
        raw: bytes[t] what each of them adds to the text: of all tokens joined, they are the text in UTF-8 (ill-formed
            bytes are U+FFFD in the text). Empty for tokens that stay out of it: end of sequence, special tokens,
            those of a stop string.
        offsets: int[t] characters of the choice's text before each.
        logprobs: [t], or None when they were not asked for.
        output_tokens: of the choice so far, for usage.
        prompt: the prompt's own detail, with the first events of a choice; None later, or when it was not asked for.
    """

    ids: list[int] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogProbs] | None = None
    output_tokens: int = 0
    prompt: PromptDetail | None = None

    def extend(self, later: Detail) -> None:
        """Adds the tokens of a later detail of the same choice."""
        self.ids += later.ids
        self.raw += later.raw
        self.offsets += later.offsets
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.output_tokens = later.output_tokens
        self.prompt = self.prompt or later.prompt


@dataclass(frozen=True, slots=True)
class PromptDetail:
    """The prompt of a choice.

    Attributes:
        ids: int32[p].
        logprobs: of all of them but the first, or None when they were not asked for.
    """

    ids: npt.NDArray[np.int32]
    logprobs: list[TokenLogProbs] | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended.

    Attributes:
        reason: OpenAI's word: ``stop``, ``length`` or ``tool_calls``.
        stop: the stop string, or the id in ``stop_token_ids``, that ended it; None when it was anything else.
        output_tokens: for usage.
    """

    reason: str
    stop: str | int | None
    output_tokens: int


@dataclass(slots=True)
class ToolCall:
    """One call of an answer that is not streamed; ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of an answer that is not streamed.

    Attributes:
        index: its number in the answer.
        events: what the parser made of its text, neighbours of one kind joined.
        ending: how it ended.
        detail: of all its tokens; None when it was not asked for.
    """

    index: int
    events: Sequence[Event]
    ending: Ending
    detail: Detail | None

    @property
    def content(self) -> str:
        """The answer's text."""
        return "".join(event.text for event in self.events if isinstance(event, Content))

    @property
    def reasoning(self) -> str:
        """What was thought before."""
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls, by index."""
        calls: list[ToolCall] = []
        for event in self.events:
            if isinstance(event, ToolCallBegin):
                calls.append(ToolCall(event.id, event.name, ""))
            elif isinstance(event, ToolCallArguments):
                calls[event.index].arguments += event.text
        return calls


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, over all its choices.

    Attributes:
        prompt_tokens: of all prompts, each counted once.
        completion_tokens: of all choices that were generated.
        cached_tokens: prompt tokens that came from the prefix cache.
        reasoning_tokens: of ``completion_tokens``, those that the model thought with.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def as_openai(self) -> dict[str, Any]:
        """Returns it in OpenAI's words, as in chat and plain completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of an answer before it begins.

    Attributes:
        identity: its id, unique, with the shape's prefix.
        created: seconds since the epoch.
        model: the name that was asked for.
        prompt_tokens: of all prompts.
    """

    identity: str
    created: int
    model: str
    prompt_tokens: int


class ChunkEncoder(Protocol):
    """Turns what happens to the choices of one streamed answer into server-sent events.

    Calls come in this order: `opening` of every choice; for each choice `events`, any number of times, then `end`;
    `usage`, if the job asks for it; `done`. `error` may come at any point after `opening`, and is the last call. Each
    returns whole events as bytes, or nothing.
    """

    def opening(self, index: int) -> bytes:
        """Returns what comes before anything else of a choice."""

    def events(self, index: int, events: Sequence[Event], detail: Detail | None) -> bytes:
        """Returns the bytes for more of a choice: at least one event, and the tokens whose text is in them."""

    def end(self, index: int, ending: Ending, detail: Detail | None) -> bytes:
        """Returns the bytes that end a choice; ``detail`` has the last tokens, those that brought no event."""

    def usage(self, usage: Usage) -> bytes:
        """Returns the bytes with the usage of the request."""

    def done(self) -> bytes:
        """Returns what ends the stream after a complete answer."""

    def error(self, error: TercetError) -> bytes:
        """Returns what ends the stream when the request fails in the middle of it."""


class AnswerShape(Protocol):
    """How answers are written. An instance may be one endpoint's, or one request's with what it needs of its fields."""

    @property
    def identity_prefix(self) -> str:
        """What ids begin with."""

    def chunks(self, head: AnswerHead) -> ChunkEncoder:
        """Returns the encoder of a streamed answer."""

    def body(self, head: AnswerHead, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        """Returns a whole answer, as JSON values."""


def joined(events: Iterable[Event]) -> list[Event]:
    """Returns ``events`` with neighbours of the same kind (and call) made into one."""
    result: list[Event] = []
    texts: list[str] = []

    def close() -> None:
        if len(texts) > 1:
            last = result[-1]
            if isinstance(last, ToolCallArguments):
                result[-1] = ToolCallArguments(last.index, "".join(texts))
            elif not isinstance(last, ToolCallBegin):
                result[-1] = type(last)("".join(texts))
        texts.clear()

    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ToolCallBegin):
            close()
            result.append(event)
        elif type(event) is type(last) and getattr(event, "index", None) == getattr(last, "index", None):
            texts.append(event.text)
        else:
            close()
            result.append(event)
            texts.append(event.text)
    close()
    return result
