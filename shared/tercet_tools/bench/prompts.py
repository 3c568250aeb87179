"""What is asked: random prompts of a given length, or those of a file. The same seed gives the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tercet_tools.bench.settings import Span

WORDS: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "kid", "body",
    "back", "parent", "face", "level", "office", "door", "health", "person", "art", "war", "history", "party",
    "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force",
    "education", "foot", "boy", "age", "policy", "music", "market", "sense", "nation", "plan", "college", "interest",
    "death", "experience", "effect", "use", "class", "control", "care", "field", "development", "role", "effort",
    "rate", "heart", "drug", "show", "leader", "light", "voice", "wife", "police", "mind", "price", "report",
    "decision", "son", "view", "town", "road", "table", "wall", "film", "song", "tree", "sea", "king", "page",
    "food", "summer",
)  # fmt: skip
"""Words that are mostly one token each, whatever the tokenizer."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request without what is the same for all.

    Attributes:
        fields: ``prompt`` or ``messages``.
        output_tokens: tokens to be asked for.
    """

    fields: dict[str, Any]
    output_tokens: int


class Prompts(Protocol):
    """A source of requests."""

    def questions(self, seed: int) -> Iterator[Question]:
        """Returns endless requests; equal seeds give equal ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomIds:
    """Random token ids, for completions: the length is exact, and no tokenizer is needed.

    Attributes:
        vocabulary: the ids that are drawn.
        input_tokens: tokens of a prompt, the shared ones included.
        output_tokens: tokens of an answer.
        shared_prefix: tokens that all prompts begin with.
        prefix_seed: what these are drawn with.
    """

    vocabulary: Span
    input_tokens: Span
    output_tokens: Span
    shared_prefix: int
    prefix_seed: int

    def questions(self, seed: int) -> Iterator[Question]:
        """Returns endless requests."""
        ids = range(self.vocabulary.low, self.vocabulary.high + 1)
        prefix = random.Random(self.prefix_seed).choices(ids, k=self.shared_prefix)  # noqa: S311  # no secret
        draw = random.Random(seed)  # noqa: S311
        while True:
            count = draw.randint(self.input_tokens.low, self.input_tokens.high)
            prompt = prefix + draw.choices(ids, k=count - self.shared_prefix)
            yield Question({"prompt": prompt}, draw.randint(self.output_tokens.low, self.output_tokens.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWords:
    """Random words as one message, for chats; how many make the wanted tokens was measured on the server.

    Attributes:
        input_tokens: tokens of a prompt, with those of the template and the shared ones.
        output_tokens: tokens of an answer.
        shared_prefix: tokens that all prompts begin with, the template's included.
        prefix_seed: what these are drawn with.
        overhead: tokens of a prompt besides the words.
        per_word: tokens of a word.
    """

    input_tokens: Span
    output_tokens: Span
    shared_prefix: int
    prefix_seed: int
    overhead: float
    per_word: float

    def questions(self, seed: int) -> Iterator[Question]:
        """Returns endless requests."""
        shared = self._words(self.shared_prefix) if self.shared_prefix else 0
        prefix = random.Random(self.prefix_seed).choices(WORDS, k=shared)  # noqa: S311  # no secret
        draw = random.Random(seed)  # noqa: S311
        while True:
            count = max(1, self._words(draw.randint(self.input_tokens.low, self.input_tokens.high)) - shared)
            yield Question(
                message(" ".join(prefix + draw.choices(WORDS, k=count))),
                draw.randint(self.output_tokens.low, self.output_tokens.high),
            )

    def _words(self, tokens: int) -> int:
        return max(0, round((tokens - self.overhead) / self.per_word))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Requests of a file, in an order that the seed decides, again and again.

    Attributes:
        lines: the requests; those without a length of their own have output_tokens 0.
        output_tokens: tokens of an answer of those.
    """

    lines: tuple[Question, ...]
    output_tokens: Span

    def questions(self, seed: int) -> Iterator[Question]:
        """Returns endless requests."""
        draw = random.Random(seed)  # noqa: S311  # no secret
        while True:
            for line in draw.sample(self.lines, k=len(self.lines)):
                count = draw.randint(self.output_tokens.low, self.output_tokens.high)
                yield Question(line.fields, line.output_tokens or count)


def message(text: str) -> dict[str, Any]:
    """Returns the fields of a chat that begins with ``text``."""
    return {"messages": [{"role": "user", "content": text}]}


def read_dataset(path: Path, *, chat: bool) -> tuple[Question, ...]:
    """Reads JSON lines; each has ``messages`` or ``prompt`` (text or token ids), and may have ``max_tokens``.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not of that form; the sentence names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"The dataset {path} cannot be read: {error.strerror}.", param="dataset") from None
    found = tuple(_question(line, f"{path}:{number}", chat) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise ConfigurationError(f"The dataset {path} is empty.", param="dataset")
    return found


def _question(line: bytes, where: str, chat: bool) -> Question:
    def wrong(reason: str) -> ConfigurationError:
        return ConfigurationError(f"{where}: {reason}", param="dataset")

    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise wrong(f"not JSON: {error}.") from None
    if not isinstance(row, dict):
        raise wrong("not a JSON object.")
    messages, prompt, count = row.get("messages"), row.get("prompt"), row.get("max_tokens", 0)
    if type(count) is not int or count < 0:
        raise wrong("max_tokens is not a number of tokens.")
    if isinstance(messages, list) and messages:
        if not chat:
            raise wrong("messages need --endpoint chat.")
        return Question({"messages": messages}, count)
    if isinstance(prompt, str) and prompt:
        return Question(message(prompt) if chat else {"prompt": prompt}, count)
    if isinstance(prompt, list) and prompt and set(map(type, prompt)) == {int}:
        if chat:
            raise wrong("a prompt of token ids needs --endpoint completions.")
        return Question({"prompt": prompt}, count)
    raise wrong("there is neither a prompt (text or token ids) nor messages (a list).")
