"""Whatever bytes come, nothing is answered with a fault of ours, every answer is bounded, and errors have their shape.

A few thousand requests by default, in seconds; ``FUZZ_EXAMPLES`` (1 by default) multiplies them, ``FUZZ_SEED`` chooses
others. ``make fuzz`` does both for long, and shows the counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.contract.frontend.conftest import MODEL, TIMEOUT, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "1"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MAX_ANSWER = 512 * 1024
MAX_MESSAGE = 2_000
JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.timeout(120 + 60 * EXAMPLES)

_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks.", "parameters": {"type": "object", "properties": {"q": {}}}},
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "tide"}'}}
_SAMPLING: dict[str, Any] = {
    "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 2, "stop": ["x"],
    "stop_token_ids": [7], "logit_bias": {"5": 1.5}, "presence_penalty": 0.5, "repetition_penalty": 1.1,
    "min_tokens": 1, "ignore_eos": False, "user": "u", "priority": 3, "cache_salt": "s", "queue_timeout": 5.0,
    "allowed_token_ids": [5, 6], "bad_words": ["a"], "include_stop_str_in_output": True, "prompt_logprobs": 1,
    "skip_special_tokens": True, "truncate_prompt_tokens": 20, "return_token_ids": True, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip

RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "a"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": "high"},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"a": [1]},
        **_SAMPLING,
    },
    "/v1/completions": {"model": MODEL, "prompt": ["Hi", "You"], "logprobs": 2, "echo": True, **_SAMPLING},
    "/v1/responses": {
        "model": MODEL,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "high"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "look_up", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "reasoning": {"effort": "none"},
        "max_output_tokens": 20,
        "temperature": 0.5,
        "store": True,
        "stream": True,
        "truncation": "auto",
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look_up", "input": {"q": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "high"}]},
        ],
        "tools": [{"name": "look_up", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 5,
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "stream": True,
    },
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "system": "Brief."},
    "/v1/embeddings": {
        "model": MODEL, "input": ["Hi", "You"], "encoding_format": "float", "dimensions": 2, "pooling": "last",
        "user": "u",
    },
    "/tokenize": {"model": MODEL, "prompt": "Hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
}  # fmt: skip
"""A request that asks for nearly everything, by path."""

STRUCTURED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"guided_grammar": "start: /a+/"},
    {"tool_choice": {"type": "function", "function": {"name": "look_up"}}, "tools": [_TOOL]},
    {"tool_choice": "required", "tools": [_TOOL]},
]

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64, 10**40, 0.5, -0.0, 1e308, -1e308,
    5e-324, "", "a", "a" * 5_000, "\0", "a\0b", "\ud800", "\udfff\ud800", "\u202e", "\U0010ffff", "NaN", "null", "{}",
    "é" * 300, [], [[]], [None], [0], ["a"], [{}], [[[[[[]]]]]], {}, {"": None}, {"a": {}}, {"type": "text"},
    {"type": None}, {"type": "function"}, {"type": "json_schema"}, {"role": "user", "content": "a"}, {"$ref": "#"},
    {"type": "object", "a": []}, [1] * 2_000, ["a"] * 1_500, {str(number): number for number in range(1_500)},
]  # fmt: skip
"""Values that nobody expects where they are put."""

LITERALS = [
    b"NaN", b"-Infinity", b"1e999", b"00", b"-", b"1" * 400, b"0." + b"3" * 400, b'"\\ud800"', b'"\\u0000"', b'"\xff"',
]  # fmt: skip
"""What JSON does not allow, or hardly."""


class Server:
    """A front end over a fake core in a thread of its own, and the counts of what was sent to it."""

    def __init__(self, text: ModelText, says: Callable[[str], Any]) -> None:
        self.url = ""
        self.counts: Counter[tuple[str, int]] = Counter()
        self._text = text
        self._says = says
        self._up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="front end")

    @contextmanager
    def running(self) -> Iterator[httpx.Client]:
        """Runs it."""
        self._thread.start()
        try:
            assert self._up.wait(TIMEOUT)
            with httpx.Client(base_url=self.url, timeout=TIMEOUT) as self.http:
                yield self.http
        finally:
            if self._loop is not None and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        answers = FakeCore(outputs=self._says("Fine."), cached=1)
        async with answers as core, running(self._text, [core], max_body_bytes=2_000_000) as front_end:
            self.url = front_end.url
            self._up.set()
            await self._stop.wait()

    def send(self, path: str, body: Any, what: str) -> None:
        """Posts a body, bytes or a value, and checks the answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
        response = self.http.post(path, content=content, headers=JSON)
        self.check(response.status_code, response.content, path, what, content)

    def check(self, status: int, content: bytes, path: str, what: str, sent: object) -> None:
        """Checks an answer, and counts it."""
        self.counts[what, status] += 1
        shown = f"{what}: {path} answered {status} {content[:500]!r} to {repr(sent)[:2_000]}"
        assert status < 500, shown
        assert len(content) <= MAX_ANSWER, shown
        # A stream has begun before it can fail; it must not fail by our fault either.
        assert b'"internal_error"' not in content, shown
        assert b'"api_error"' not in content, shown
        if status >= 400:
            error = json.loads(content)
            message = error["error"]["message"]
            assert message, shown
            assert len(message) <= MAX_MESSAGE, shown
            if path.startswith("/v1/messages"):
                assert error["type"] == "error", shown
                assert set(error["error"]) == {"type", "message"}, shown
            else:
                assert set(error["error"]) == {"message", "type", "param", "code"}, shown

    def report(self) -> str:
        """Returns the counts, one line per kind of request."""
        kinds: dict[str, Counter[int]] = {}
        for (what, status), count in self.counts.items():
            kinds.setdefault(what, Counter())[status] += count
        lines = [
            f"{what:<16} {sum(found.values()):>8} requests  "
            + "  ".join(f"{status}: {count}" for status, count in sorted(found.items()))
            for what, found in kinds.items()
        ]
        return "\n".join(lines)


@pytest.fixture(scope="module")
def server(text: ModelText, says: Callable[[str], Any]) -> Iterator[Server]:
    server = Server(text, says)
    with server.running():
        yield server
    print(f"\n{server.report()}")


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{request.node.name} {SEED}")


def test_the_rich_requests_are_right(server: Server) -> None:
    """Else what is made of them would all fail for the same reason."""
    for path, body in RICH.items():
        response = server.http.post(path, json=body)
        assert response.status_code == 200, f"{path}: {response.text}"
    for extra in STRUCTURED:
        chat = {"model": MODEL, "messages": RICH["/v1/chat/completions"]["messages"]}
        response = server.http.post("/v1/chat/completions", json=chat | extra)
        assert response.status_code == 200, f"{extra}: {response.text}"


@pytest.mark.parametrize("path", RICH)
def test_every_field_with_every_kind_of_value(server: Server, path: str, chance: random.Random) -> None:
    document = server.http.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    names = sorted(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"])
    pairs = [(name, value) for name in names for value in JUNK]
    simple = {
        key: value for key, value in RICH[path].items() if key in ("model", "messages", "prompt", "input", "tokens")
    }
    simple |= {"max_tokens": 5} if path == "/v1/messages" else {}
    for name, value in chance.sample(pairs, min(150 * EXAMPLES, len(pairs))):
        server.send(path, simple | {name: value}, "fields")


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values within ``value``."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _nodes(child, (*path, key))


def _mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Returns a copy in which a few values are replaced, dropped or doubled."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        nodes = list(_nodes(copy))
        if not nodes:
            break
        *way, last = chance.choice(nodes)
        parent: Any = copy
        for key in way:
            parent = parent[key]
        what = chance.randrange(4)
        if what == 0 and isinstance(parent, list):
            parent.insert(last, deepcopy(chance.choice(JUNK)))
        elif what == 1:
            del parent[last]
        elif what == 2 and isinstance(parent, dict):
            parent[chance.choice(("type", "role", "content", "name", "a", "$ref"))] = deepcopy(chance.choice(JUNK))
        else:
            parent[last] = deepcopy(chance.choice(JUNK))
    return copy


@pytest.mark.parametrize("path", RICH)
def test_values_anywhere_in_a_rich_request(server: Server, path: str, chance: random.Random) -> None:
    bases = [RICH[path]]
    if path == "/v1/chat/completions":
        bases += [{"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **extra} for extra in STRUCTURED]
    for _ in range(120 * EXAMPLES):
        server.send(path, _mutated(chance.choice(bases), chance), "values")


@pytest.mark.parametrize("path", RICH)
def test_bytes(server: Server, path: str, chance: random.Random) -> None:
    valid = json.dumps(RICH[path]).encode()
    for _ in range(40 * EXAMPLES):
        at = chance.randrange(len(valid))
        for body in (
            valid[:at],  # truncated
            valid[:at] + chance.randbytes(chance.randrange(1, 9)) + valid[at + 1 :],
            valid[:at] + chance.choice(LITERALS) + valid[at + chance.randrange(4) :],
            chance.randbytes(chance.randrange(0, 3_000)),
        ):
            server.send(path, body, "bytes")
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"messages":', b"}]")):
        for depth in (200, 1_000, 1_100, 100_000):
            nested = opening * depth + b"1" + closing * depth
            server.send(path, nested, "depth")
            for name in ("messages", "input", "prompt", "tools", "metadata", "guided_json", "model"):
                # The whole text may be no JSON, as the parser allows no such depth.
                server.send(path, valid[:-1] + b', "' + name.encode() + b'": ' + nested + b"}", "depth")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.filterwarnings("ignore")  # of schemathesis and what it uses
def test_what_the_document_describes(server: Server, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @seed(SEED)
        @settings(
            max_examples=6 * EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode))
        def run(case: schemathesis.Case) -> None:
            nonlocal tried
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL  # a name out of nothing would end most requests before anything else does
            response = case.call()
            tried += 1
            server.check(response.status_code, response.content, case.path, mode.value, case.body)

        try:
            run()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, operation.label  # nothing about it can be wrong
    assert tried > 50
