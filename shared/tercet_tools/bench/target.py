"""A server that is measured: its model, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from tercet_shared.errors import bounded
from tercet_tools.bench.answers import EventStream, Sample
from tercet_tools.bench.http import HttpClient, RequestFailedError, Whole
from tercet_tools.bench.prompts import WORDS, message

if TYPE_CHECKING:
    from tercet_tools.bench.prompts import Question

_FEW, _MANY = 16, 208
"""Words of the two requests that tell how many tokens words make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server with the fields that every request has.

    Attributes:
        url: as the user gave it.
        client: its connections.
        model: name that is asked for.
        endpoint: which one is asked.
        fields: members of every request.
    """

    url: str
    client: HttpClient
    model: str
    endpoint: Literal["completions", "chat"]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """What is asked."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, question: Question) -> bytes:
        """Returns the body that asks ``question``."""
        fields = {
            "model": self.model,
            **question.fields,
            "max_tokens": question.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return orjson.dumps(fields)

    async def ask(self, body: bytes, question: Question, start: float) -> Sample:
        """Sends a request and returns its times, counted from ``start``.

        Raises:
            RequestFailedError: it got no whole answer.
        """
        answer = EventStream(start, question.output_tokens)
        await self.client.post(self.path, body, answer)
        return answer.sample()

    async def prompt_tokens(self, words: int) -> int:
        """Returns how many prompt tokens the server counts for so many words. Raises RequestFailedError."""
        text = " ".join(WORDS[index % len(WORDS)] for index in range(words))
        prompt = message(text) if self.endpoint == "chat" else {"prompt": text}
        answer = Whole()
        body = {"model": self.model, **prompt, **self.fields, "max_tokens": 1, "stream": False}
        await self.client.post(self.path, orjson.dumps(body), answer)
        return int(_json(answer)["usage"]["prompt_tokens"])

    async def tokens_of_words(self) -> tuple[float, float]:
        """Returns the tokens of a prompt without words, and those of each word. Raises RequestFailedError."""
        try:
            few, many = await self.prompt_tokens(_FEW), await self.prompt_tokens(_MANY)
        except (KeyError, TypeError, ValueError):
            raise RequestFailedError(
                "no usage",
                f"{self.url} does not say how many tokens a prompt has, so none of a given length can be made.",
            ) from None
        per_word = (many - few) / (_MANY - _FEW)
        if not per_word > 0:
            raise RequestFailedError(
                "no usage", f"{self.url} counts as many tokens for long prompts as for short ones."
            )
        return few - _FEW * per_word, per_word


async def first_model(client: HttpClient, url: str) -> str:
    """Returns the name of the first model that a server lists. Raises RequestFailedError."""
    answer = Whole()
    await client.get("/v1/models", answer)
    try:
        return str(_json(answer)["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RequestFailedError("no model", f"{url} lists no model; name one with --model.") from None


def _json(answer: Whole) -> Any:
    if answer.status != 200:
        text = bounded(answer.data.decode(errors="replace"), 300)
        raise RequestFailedError(f"HTTP {answer.status}", f"HTTP {answer.status}: {text}")
    try:
        return orjson.loads(answer.data)
    except orjson.JSONDecodeError:
        raise RequestFailedError("not JSON", "The answer is not JSON.") from None
