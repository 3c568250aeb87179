"""Several models behind one address, other names for them, and names whose requests are divided among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tercet_frontend.access.notes import Notes
from tercet_frontend.auth import ApiKeys
from tercet_frontend.cores import CorePool, StreamOptions
from tercet_frontend.edge import EdgeOptions
from tercet_frontend.models import Aliases, ModelCatalog, NamedModel, ServedModels
from tercet_frontend.models.library import LoadedModel
from tercet_frontend.routing import Router, routing_policy
from tercet_frontend.tokenizing import ModelText
from tercet_shared.checkpoint import Checkpoint
from tercet_shared.registry.static import StaticFleet
from tests.contract.frontend.conftest import EOS, TIMEOUT, FrontEnd, events, running
from tests.contract.frontend.test_access import auth, keys_of
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.core import FakeCore
from tests.fakes.ports import free_port

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Où est la gare? 12"}]
ALIASES = ["chat=big", "old=chat"]
SPLITS = ["canary=big:1,small:1", "other=old:3,small:1"]


class Lines:
    """A log in memory."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def write(self, entry: Any) -> None:
        self.entries.append(entry)

    def reopen(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class World:
    """A front end of two models, each with a core that says which it is."""

    front_end: FrontEnd
    catalog: ModelCatalog
    big: FakeCore
    small: FakeCore
    log: Lines

    @property
    def http(self) -> httpx.AsyncClient:
        return self.front_end.http

    async def names(self) -> list[str]:
        return [model["id"] for model in (await self.http.get("/v1/models")).json()["data"]]

    def sizes(self) -> tuple[int, int]:
        return len(self.big.requests), len(self.small.requests)


class Library:
    """The two models, which are read once for all tests."""

    def __init__(self, text: ModelText, small: ModelText) -> None:
        self._texts = {"big": text, "small": small}

    async def get(self, source: str, _revision: str | None) -> LoadedModel:
        text = self._texts[source]
        return LoadedModel(text, text.tokenizer.fingerprint, source, f"/{source}")


@pytest.fixture(scope="module")
def library(text: ModelText, tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = write_tiny_llama(tmp_path_factory.mktemp("models") / "small", vocab=300)
    return Library(text, ModelText.read(Checkpoint.open(str(path))))


@asynccontextmanager
async def two_models(
    library: Library, *, api_keys: ApiKeys | None = None, only_big: bool = False
) -> AsyncIterator[World]:
    catalog = ModelCatalog([NamedModel("big"), NamedModel("small")], library)  # type: ignore[arg-type]
    await catalog.load()

    def says(name: str, answer: str) -> Any:
        text = catalog.text(name)
        assert text is not None
        ids = [*text.tokenizer.encode(answer, add_special_tokens=False), EOS]
        return lambda _request: ids

    def core(name: str, answer: str, **more: Any) -> FakeCore:
        text = catalog.text(name)
        assert text is not None
        return FakeCore(
            f"127.0.0.1:{free_port()}", outputs=says(name, answer), core_id=name, served_names=[name],
            tokenizer_fingerprint=text.tokenizer.fingerprint, **more,
        )  # fmt: skip

    big = core("big", "I am the big one.")
    small = core("small", "I am the small one.", vocab_size=300, max_model_len=512)
    log = Lines()
    async with big, small:
        addresses = [big.address] if only_big else [big.address, small.address]
        pool = CorePool(
            StaticFleet(addresses),
            models=catalog,
            router=Router(routing_policy("least_loaded")),
            options=StreamOptions(backoff_limit=0.1),
            frontend_id="front end of a test",
        )
        aliases = Aliases(ALIASES, SPLITS, models=catalog.names, complete=True)
        text = catalog.text("big")
        assert text is not None
        edge = EdgeOptions(notes=Notes(access=log))  # type: ignore[arg-type]  # a journal without a file
        models = ServedModels(catalog, pool, aliases)
        async with running(text, [], backend=(pool, models), edge=edge, api_keys=api_keys) as front_end:
            world = World(front_end, catalog, big, small, log)
            async with asyncio.timeout(TIMEOUT):
                while len(pool.models()) < len(addresses):
                    await pool.wait_for_change()
            yield world


async def test_each_model_has_its_own_text(library: Library) -> None:
    async with two_models(library) as world:
        for name, core in (("big", world.big), ("small", world.small)):
            answer = (await world.http.post(CHAT, json={"model": name, "messages": MESSAGES})).json()
            assert answer["model"] == name
            assert answer["choices"][0]["message"]["content"] == f"I am the {name} one."
            text = world.catalog.text(name)
            assert text is not None
            prompt = core.requests[-1].prompt_ids
            assert "Où est la gare? 12" in text.tokenizer.decode(prompt, skip_special_tokens=False)
            tokenized = await world.http.post("/tokenize", json={"model": name, "messages": MESSAGES})
            assert tokenized.json()["tokens"] == prompt
            back = await world.http.post("/detokenize", json={"model": name, "tokens": prompt})
            assert back.json()["prompt"] == text.tokenizer.decode(prompt, skip_special_tokens=False)
        assert world.sizes() == (1, 1)
        # Limits are those of each model; without a name, the first is taken.
        assert (await world.http.post("/tokenize", json={"prompt": "a"})).json()["max_model_len"] == 2048
        for path, more in (("/v1/completions", {"prompt": "a " * 600}), (CHAT, {"messages": MESSAGES})):
            long = await world.http.post(path, json={"model": "small", "max_tokens": 511} | more)
            assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        for path in (CHAT, "/v1/messages", "/v1/responses", "/tokenize", "/v1/embeddings"):
            asks = {"input": "a"} if path in {"/v1/responses", "/v1/embeddings"} else {"messages": MESSAGES}
            body = {"model": "none", "max_tokens": 5} | asks
            error = await world.http.post(path, json=body)
            assert error.status_code == 404, path


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_the_name_that_was_asked_for(library: Library, stream: bool) -> None:
    async with two_models(library) as world:
        body = {"model": "old", "messages": MESSAGES, "stream": stream}
        if stream:
            async with world.http.stream("POST", CHAT, json=body) as response:
                *chunks, _ = await events(response)
            assert {orjson.loads(chunk)["model"] for chunk in chunks} == {"old"}
        else:
            assert (await world.http.post(CHAT, json=body)).json()["model"] == "old"
        for path, more in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 30}),
            ("/v1/embeddings", {"input": "a"}),
        ):
            assert (await world.http.post(path, json={"model": "old"} | more)).json()["model"] == "old"
        assert world.sizes() == (5, 0)
        assert {(entry["model"], entry["served_model"]) for entry in world.log.entries} == {("old", "big")}


async def test_the_list_of_models(library: Library) -> None:
    async with two_models(library) as world:
        listed = {model["id"]: model for model in (await world.http.get("/v1/models")).json()["data"]}
        shown = {name: (model["root"], model["parent"], model["max_model_len"]) for name, model in listed.items()}
        assert shown == {
            "big": ("big", None, 2048),
            "small": ("small", None, 512),
            "chat": ("big", "big", 2048),
            "old": ("big", "chat", 2048),
            "canary": ("canary", None, 512),
            "other": ("other", None, 512),
        }
        assert (await world.http.get("/v1/models/old")).json() == listed["old"]
        await world.big.kill()
        async with asyncio.timeout(TIMEOUT):
            while len(world.front_end.cores.models()) > 1:
                await world.front_end.cores.wait_for_change()
        assert await world.names() == ["small", "canary", "other"]
        assert (await world.http.get("/readyz")).status_code == 200
        for name in ("big", "chat"):
            gone = await world.http.post(CHAT, json={"model": name, "messages": MESSAGES})
            assert (gone.status_code, gone.json()["error"]["code"]) == (503, "service_unavailable")
            assert gone.headers["Retry-After"]
        # A split goes on with what is left, and only with that.
        for _ in range(4):
            answer = await world.http.post(CHAT, json={"model": "canary", "messages": MESSAGES})
            assert answer.json()["choices"][0]["message"]["content"] == "I am the small one."


def sessions(kind: str, number: int) -> dict[str, Any]:
    if kind == "header":
        return {"headers": {"X-Session-Id": f"s{number}"}}
    return {"json": {kind: f"s{number}"}}


@pytest.mark.parametrize("kind", ["header", "prompt_cache_key", "user", "safety_identifier"])
async def test_a_session_stays_with_its_model(library: Library, kind: str) -> None:
    async with two_models(library) as world:
        aliases = Aliases(ALIASES, SPLITS)
        expected = [aliases.choose("canary", ["big", "small"], f"s{number}") for number in range(8)]
        assert set(expected) == {"big", "small"}
        for number, model in enumerate(expected):
            session = sessions(kind, number)
            body = {"model": "canary", "messages": MESSAGES, "n": 2} | session.get("json", {})
            for _ in range(2):
                before = world.sizes()
                answer = await world.http.post(CHAT, json=body, headers=session.get("headers"))
                assert answer.status_code == 200
                # Both choices went to one model.
                assert {choice["message"]["content"] for choice in answer.json()["choices"]} == {
                    f"I am the {model} one."
                }
                after = world.sizes()
                assert (after[0] - before[0], after[1] - before[1]) == ((2, 0) if model == "big" else (0, 2))


async def test_what_says_which_session_it_is(library: Library) -> None:
    seen: list[str] = []
    async with two_models(library) as world:
        submit = world.front_end.cores.submit

        def noted(request: Any) -> Any:
            seen.append(request.session)
            return submit(request)

        world.front_end.cores.submit = noted  # type: ignore[method-assign]
        named = {"safety_identifier": "d", "user": "c", "prompt_cache_key": "b"}
        body = {"model": "big", "messages": MESSAGES}
        await world.http.post(CHAT, json=body | named, headers={"X-Session-Id": "a"})
        for name in reversed(list(named)):
            await world.http.post(CHAT, json=body | named)
            named.pop(name)
        await world.http.post(CHAT, json=body)
        await world.http.post("/v1/messages", json=body | {"max_tokens": 5, "metadata": {"user_id": "e"}})
        await world.http.post("/v1/responses", json={"model": "big", "input": "a", "user": "f" * 1000})
        await world.http.post("/v1/embeddings", json={"model": "big", "input": "a", "user": "g"})
    *short, long, last = seen
    assert [*short, last] == ["a", "b", "c", "d", "", "e", "g"]
    assert len(long) == 64


async def test_keys_may_use_what_they_name(library: Library, tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys.json", one={"models": ["canary", "small"]})
    async with two_models(library, api_keys=keys) as world:
        world.http.headers.update(auth("one"))
        assert await world.names() == ["small", "canary"]
        for name, status in (("canary", 200), ("small", 200), ("big", 404), ("chat", 404)):
            answer = await world.http.post(CHAT, json={"model": name, "messages": MESSAGES})
            assert answer.status_code == status
        assert (await world.http.get("/v1/models/big")).status_code == 404
        assert (await world.http.post("/tokenize", json={"prompt": "a"})).json()["max_model_len"] == 512


async def test_a_model_without_a_core(library: Library) -> None:
    async with two_models(library, only_big=True) as world:
        assert await world.names() == ["big", "chat", "old", "canary", "other"]
        answer = await world.http.post(CHAT, json={"model": "small", "messages": MESSAGES})
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "model")
