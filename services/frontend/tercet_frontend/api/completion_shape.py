"""Answers as plain completions, whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from tercet_frontend.api.logprobs import LegacyLogProbs, TokenNames, echo_of, prompt_logprobs
from tercet_frontend.parsing.events import Content
from tercet_frontend.sse import Chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.api.answers import AnswerHead, Detail, Ending, FinishedChoice, PromptDetail, Usage
    from tercet_frontend.parsing.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """What one request's answer has beyond the text.

    Attributes:
        names: how tokens are written.
        echo: whether the prompt comes before the text.
        prompts: each as it was sent, or None where ids were sent or not all of it was kept; for ``echo``.
        choices_per_prompt: the choices of one prompt follow each other.
        logprobs: alternatives per token; None leaves log-probabilities out.
        prompt_logprobs: the same for the prompt, in vLLM's shape.
        token_ids: with the ids of prompt and output.
        include_usage: a stream ends with the usage.
        continuous_usage: every chunk has the usage so far.
    """

    identity_prefix = "cmpl-"

    names: TokenNames
    echo: bool = False
    prompts: Sequence[str | None] = ()
    choices_per_prompt: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def chunks(self, head: AnswerHead) -> CompletionChunks:
        """Returns the encoder of a streamed answer."""
        return CompletionChunks(self, head)

    def body(self, head: AnswerHead, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        """Returns a whole answer."""
        return {
            "id": head.identity,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.as_openai(),
        }

    def _choice(self, choice: FinishedChoice) -> dict[str, Any]:
        text, detail = choice.content, choice.detail
        logprobs = None if self.logprobs is None else LegacyLogProbs(self.names, self.logprobs)
        fields: dict[str, Any] = {}
        if detail is not None:
            offset = 0
            if detail.prompt is not None:
                echoed, fields = self.prompt_fields(choice.index, detail.prompt, logprobs)
                text, offset = echoed + text, len(echoed)
            if logprobs is not None:
                logprobs.add(detail, offset)
            if self.token_ids:
                fields["token_ids"] = detail.ids
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.as_json(),
            "finish_reason": choice.ending.reason,
            "stop_reason": choice.ending.stop,
            **fields,
        }

    def prompt_fields(
        self, index: int, prompt: PromptDetail, logprobs: LegacyLogProbs | None
    ) -> tuple[str, dict[str, Any]]:
        """Returns the echoed text (if any) and what a choice says about its prompt; adds tokens to ``logprobs``."""
        text = ""
        fields: dict[str, Any] = {}
        if self.echo:
            text, offsets = echo_of(self.names.detokenizer, prompt.ids, self.prompts[index // self.choices_per_prompt])
            if logprobs is not None:
                logprobs.add_prompt(prompt, offsets)
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.names, prompt, self.prompt_logprobs)
        if self.token_ids:
            fields["prompt_token_ids"] = prompt.ids.tolist()
        return text, fields


class CompletionChunks(Chunks):
    """Events of ``/v1/completions``."""

    def __init__(self, shape: CompletionShape, head: AnswerHead) -> None:
        super().__init__(
            head, "text_completion", include_usage=shape.include_usage, continuous_usage=shape.continuous_usage
        )
        self._shape = shape
        self._heads: list[bytes] = []
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._suffix
        self._echoed: dict[int, int] = {}  # characters, by choice

    def opening(self, index: int) -> bytes:  # noqa: ARG002  # see ChunkEncoder
        """Returns nothing: completions have no role."""
        return b""

    def events(self, index: int, events: Sequence[Event], detail: Detail | None) -> bytes:
        """Returns the event for more of a choice."""
        text = "".join([event.text for event in events if isinstance(event, Content)])
        if detail is None:
            heads = self._heads
            while len(heads) <= index:
                heads.append(self._prefix + b'{"index":%d,"text":' % len(heads))
            return heads[index] + orjson.dumps(text) + self._tail
        return self._prompt(index, detail) + self._written(index, text, detail, None)

    def end(self, index: int, ending: Ending, detail: Detail | None) -> bytes:
        """Returns the event that ends a choice."""
        return self._prompt(index, detail) + self._written(index, "", detail, ending)

    def _prompt(self, index: int, detail: Detail | None) -> bytes:
        """Returns the event with the prompt, which comes first."""
        if detail is None or detail.prompt is None:
            return b""
        shape = self._shape
        logprobs = None if shape.logprobs is None else LegacyLogProbs(shape.names, shape.logprobs)
        text, fields = shape.prompt_fields(index, detail.prompt, logprobs)
        self._echoed[index] = len(text)
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.as_json(),
            "finish_reason": None,
            **fields,
        }
        return self.chunk(choice, 0)

    def _written(self, index: int, text: str, detail: Detail | None, ending: Ending | None) -> bytes:
        shape = self._shape
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None if ending is None else ending.reason,
        }
        if ending is not None:
            choice["stop_reason"] = ending.stop
        if detail is not None:
            if shape.logprobs is not None:
                logprobs = LegacyLogProbs(shape.names, shape.logprobs)
                logprobs.add(detail, self._echoed.get(index, 0))
                choice["logprobs"] = logprobs.as_json()
            if shape.token_ids:
                choice["token_ids"] = detail.ids
        return self.chunk(choice, 0 if detail is None else detail.output_tokens)
