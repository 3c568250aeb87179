"""What `tercet bench serve` can be told."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  # pydantic reads the annotation
from typing import Any, Final, Literal, NewType

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tercet_shared.config import Seconds  # noqa: TC001  # pydantic reads the annotation
from tercet_shared.errors import ConfigurationError
from tercet_tools.settings import Floats, Integers, Texts, ToolSettings

Milliseconds = NewType("Milliseconds", float)

GOODPUT_FIGURES: Final = ("ttft", "tpot", "e2e")
"""What `--goodput` can set a limit to; see `tercet_tools.bench.answers.Sample`."""

_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class Span:
    """A number, or a range of them from which each request draws its own; both ends are included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, name: str) -> Span:
        """Reads ``128`` or ``64-256``. Raises ConfigurationError, naming the setting, for anything else."""
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise _wrong(name, f"{text!r} is neither a number nor a range such as 64-256.")
        span = cls(int(found[1]), int(found[2] or found[1]))
        if not 1 <= span.low <= span.high:
            raise _wrong(name, f"{text!r} must begin at 1 or more and not end before it begins.")
        return span


class BenchSettings(ToolSettings):
    """Puts load on servers with an OpenAI-style API, and reports latency and throughput."""

    model_config = SettingsConfigDict(
        cli_prog_name="tercet bench serve", cli_shortcuts={"json-file": "json", "plot-file": "plot"}
    )
    EXAMPLES = """\
  tercet bench serve --url http://127.0.0.1:8000
  tercet bench serve --url http://127.0.0.1:8000 --concurrency 1,4,16 --input-tokens 512 --output-tokens 64-256
  tercet bench serve --url http://127.0.0.1:8000 --request-rate 1,4,inf --duration 60 --goodput ttft:200,tpot:50
  tercet bench serve --url http://a:8000 --url http://b:8000 --rounds 3 --json compared.json --plot compared.svg
  tercet bench serve --url http://127.0.0.1:8000 --endpoint chat --dataset conversations.jsonl

With --concurrency, so many clients ask one request after another. With --request-rate, that many requests per second
arrive at random moments, whatever the server does; their times count from the moment they were due. Several URLs are
measured in turn and compared.

exit codes: 0 measured, 1 a load of which every request failed, 2 wrong usage, 130 interrupted
(what was measured until then is reported).
"""

    url: Texts = Field(default_factory=list, description="Server to measure, as http://host:port; repeat to compare.")
    model: Texts = Field(
        default_factory=list,
        description="Name to ask for: one for all servers or one for each; by default the first that a server lists.",
    )
    api_key: Texts = Field(
        default_factory=list, description="Key that is sent: one for all servers or one for each; only if asked for."
    )
    endpoint: Literal["completions", "chat"] = Field("completions", description="Which endpoint is asked.")
    concurrency: Integers = Field(
        default_factory=list, description="Clients at once, such as 1,4,16: one load after another. [default: 1,16]"
    )
    request_rate: Floats = Field(
        default_factory=list, description="Requests per second, such as 1,4,inf: one load after another."
    )
    requests: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Requests per load and round; by default 4 per client and 4 more, or what arrives in 30 seconds.",
    )
    duration: Seconds | None = Field(None, description="Seconds in which requests are begun, instead of a number.")
    rounds: int = Field(1, ge=1, le=1_000, description="How often each load is repeated, the servers in turn.")
    warmup: int = Field(1, ge=0, le=10_000, description="Requests to each server before anything is measured.")
    input_tokens: str = Field("128", description="Tokens of each prompt, such as 128 or 64-256.")
    output_tokens: str = Field("64", description="Tokens of each answer, such as 64 or 16-128.")
    shared_prefix: int = Field(0, ge=0, le=10_000_000, description="Tokens that all prompts of the run begin with.")
    vocabulary: str = Field("100-30000", description="Token ids of which prompts for completions are drawn.")
    dataset: Path | None = Field(
        None,
        description="JSON lines with `messages` or `prompt`, and `max_tokens` if wanted, instead of random prompts.",
    )
    ignore_eos: bool = Field(True, description="Ask for answers of the full length.")
    temperature: float = Field(0.0, ge=0, le=100, description="Sampling temperature that is asked for.")
    extra_body: str = Field("{}", description="JSON object whose members are added to every request.")
    goodput: Texts = Field(
        default_factory=list,
        description="Limits in milliseconds, such as ttft:200,tpot:50,e2e:5000; requests within all are counted.",
    )
    timeout: Seconds = Field(600.0, description="Seconds after which a request has failed.")
    seed: int | None = Field(
        None, ge=0, lt=2**48, description="Makes prompts and arrivals repeatable; by default nothing is asked twice."
    )
    json_file: str | None = Field(None, description="File for all figures as JSON; - is standard output.")
    plot_file: Path | None = Field(None, description="File for an SVG picture of latency and throughput by load.")

    def check(self) -> None:
        """Checks what no single field can. Raises ConfigurationError, naming the setting."""
        if not self.url:
            raise _wrong("url", "is needed, such as --url http://127.0.0.1:8000.")
        for name in ("model", "api_key"):
            if len(getattr(self, name)) not in (0, 1, len(self.url)):
                raise _wrong(name, f"takes one value, or one for each of the {len(self.url)} servers.")
        for count in self.concurrency:
            if not 1 <= count <= 100_000:
                raise _wrong("concurrency", f"{count} is not between 1 and 100000.")
        for rate in self.request_rate:
            if not rate > 0:
                raise _wrong("request_rate", f"{rate} is not above 0.")
        if self.requests is not None and self.duration is not None:
            raise _wrong("duration", "cannot be given together with --requests.")
        if self.duration is not None and any(rate == float("inf") for rate in self.request_rate):
            raise _wrong("duration", "cannot bound a --request-rate of inf; give --requests.")
        if self.dataset is None and self.shared_prefix >= self.input_span.low:
            raise _wrong("shared_prefix", f"must be less than the {self.input_span.low} tokens of the shortest prompt.")
        _ = self.output_span, self.vocabulary_span, self.limits, self.extra_fields

    @property
    def input_span(self) -> Span:
        """Tokens of a prompt."""
        return Span.parse(self.input_tokens, name="input_tokens")

    @property
    def output_span(self) -> Span:
        """Tokens of an answer."""
        return Span.parse(self.output_tokens, name="output_tokens")

    @property
    def vocabulary_span(self) -> Span:
        """Token ids of random prompts."""
        return Span.parse(self.vocabulary, name="vocabulary")

    @property
    def limits(self) -> dict[str, Milliseconds]:
        """What `--goodput` asks for, by name of the figure."""
        found: dict[str, Milliseconds] = {}
        for item in self.goodput:
            name, _, text = item.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = 0.0
            if name not in GOODPUT_FIGURES or not limit > 0:
                raise _wrong("goodput", f"{item!r} is not like ttft:200 ({', '.join(GOODPUT_FIGURES)}; milliseconds).")
            found[name] = Milliseconds(limit)
        return found

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Members that are added to every request."""
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise _wrong("extra_body", f"is not JSON: {error}.") from None
        if not isinstance(fields, dict):
            raise _wrong("extra_body", "is not a JSON object.")
        return fields


def _wrong(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"--{name.replace('_', '-')} (TERCET_{name.upper()}): {reason}", param=name)
