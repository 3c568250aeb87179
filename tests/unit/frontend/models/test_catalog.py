"""Models that were named and models that cores announce: whose text is here, and which core serves what."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tercet_frontend.models import Announced, ModelCatalog, NamedModel, TextLibrary
from tercet_frontend.models.library import LoadedModel
from tercet_shared.checkpoint import Checkpoint
from tercet_shared.errors import CheckpointError
from tercet_shared.registry.interface import CoreLoad, CoreRecord, CoreState
from tests.fakes.checkpoints import write_tiny_llama

TIMEOUT = 60.0


@dataclass(frozen=True)
class Core:
    """What a core says at its Welcome."""

    served_names: tuple[str, ...] = ()
    tokenizer_fingerprint: str = "one"
    model_name: str = "model"


def record(name: str = "a", source: str = "/one", fingerprint: str = "/one") -> CoreRecord:
    return CoreRecord(
        core_id=f"core of {name} at {source}", address=f"{name}{source}:1", incarnation="1", served_names=(name,),
        source=source, revision="", model_fingerprint="m", tokenizer_fingerprint=fingerprint, block_size=16,
        state=CoreState.READY, load=CoreLoad(),
    )  # fmt: skip


@dataclass
class Fleet:
    """A registry that says what a test wants."""

    records: list[CoreRecord] = field(default_factory=list)
    watchers: list[Callable[[], None]] = field(default_factory=list)

    def cores(self) -> Mapping[str, CoreRecord | None]:
        return {"unix:/named": None} | {each.address: each for each in self.records}

    def watch(self, changed: Callable[[], None]) -> None:
        self.watchers.append(changed)

    def say(self, *records: CoreRecord) -> None:
        self.records = list(records)
        for changed in self.watchers:
            changed()


class Library:
    """Models whose tokenizer has the fingerprint of their source; `missing` are not there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.missing: set[str] = set()
        self.fingerprints: dict[str, str] = {}
        self.question = asyncio.Event()
        self.held = asyncio.Event()
        self.held.set()

    async def get(self, source: str, revision: str | None = None) -> LoadedModel:
        self.asked.append(source if revision is None else f"{source}@{revision}")
        self.question.set()
        await self.held.wait()
        if source in self.missing:
            raise CheckpointError(f"{source} does not exist.")
        text = cast("Any", f"text of {source}")
        return LoadedModel(text, self.fingerprints.get(source, source), Path(source).name, source)


@dataclass
class World:
    """A catalog that follows a registry."""

    catalog: ModelCatalog
    announced: Announced
    fleet: Fleet
    library: Library
    changes: asyncio.Event
    run: asyncio.Task[None] = field(init=False)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                self.changes.clear()
                await self.changes.wait()

    async def settled(self) -> None:
        """Returns when the loop has taken in what was said, without a change that would show."""
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def following(*named: NamedModel, most: int = 8, linger: float = 600.0) -> AsyncIterator[World]:
    library = Library()
    announced = Announced(most, linger=linger)
    catalog = ModelCatalog(named, cast("Any", library), announced)
    world = World(catalog, announced, Fleet(), library, asyncio.Event())
    catalog.watch(world.changes.set)
    await catalog.load()
    run = world.run = asyncio.create_task(catalog.run(cast("Any", world.fleet)))
    try:
        yield world
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_a_single_model_is_served_by_every_core_with_its_tokenizer() -> None:
    catalog = ModelCatalog([NamedModel("one", ("x", "y"), "v1")], cast("Any", library := Library()))
    assert catalog.missing() == "The tokenizer is being loaded."
    assert catalog.names_of(Core()) == ()
    await catalog.load()
    assert library.asked == ["one@v1"]
    assert catalog.missing() is None
    assert catalog.names_of(Core(served_names=("whatever",))) == ("x", "y")
    other = Core(tokenizer_fingerprint="two")
    assert catalog.names_of(other) == ()
    assert "tokenizer differs" in catalog.refusal(other)
    assert (catalog.text("x"), catalog.text("model")) == ("text of one", None)
    assert (catalog.known("y"), catalog.known("model")) == (True, False)


async def test_of_several_models_names_decide() -> None:
    named = [NamedModel("/d/one", ("x",)), NamedModel("/d/two"), NamedModel("/e/one", ("z",))]
    library = Library()
    library.fingerprints = {"/d/one": "same", "/d/two": "same", "/e/one": "same"}
    catalog = ModelCatalog(named, cast("Any", library))
    await catalog.load()
    core = Core(tokenizer_fingerprint="same")
    assert catalog.names_of(replace(core, served_names=("x",))) == ("x",)
    assert catalog.names_of(replace(core, served_names=("two", "x"))) == ("x", "two")
    assert catalog.names_of(replace(core, model_name="two")) == ("two",)  # an older core, which has one name
    assert catalog.names_of(replace(core, served_names=("one",))) == ("x", "z")
    assert catalog.names_of(replace(core, served_names=("x",), tokenizer_fingerprint="other")) == ()
    assert "does not have" in catalog.refusal(replace(core, served_names=("elsewhere",)))


async def test_models_that_cores_announce_come_and_go() -> None:
    async with following(NamedModel("/named", ("n",)), linger=0.0) as world:
        assert world.catalog.missing() is None
        world.fleet.say(record("a"), record("b", "/two", "/two"), record("n", "/three", "/three"))
        await world.until(lambda: set(world.announced.models) == {"a", "b"})
        assert world.library.asked == ["/named", "/one", "/two"]  # what was named is not looked for
        assert world.catalog.text("b") == "text of /two"
        assert world.catalog.names_of(Core(("a", "b"), "/two")) == ("b",)
        world.fleet.say(record("a"))
        await world.until(lambda: set(world.announced.models) == {"a"})
        assert not world.catalog.known("b")
        assert world.catalog.text("b") is None


async def test_a_text_lingers_when_its_cores_have_left() -> None:
    async with following() as world:
        assert world.catalog.missing() == "No core has announced a model yet."
        world.fleet.say(record("a"))
        await world.until(lambda: "a" in world.announced.models)
        world.fleet.say()
        await world.settled()
        assert world.catalog.names_of(Core(("a",), "/one")) == ("a",)
        world.fleet.say(record("a"))
        await world.settled()
        assert world.library.asked == ["/one"]


async def test_one_place_is_read_once_for_all_its_names() -> None:
    async with following() as world:
        world.library.held.clear()
        world.fleet.say(record("a"), record("b"))
        await world.settled()
        world.fleet.say(record("a"), record("b"), record("c"))
        await world.settled()
        assert world.catalog.missing() == "The tokenizer of a, b, c is being loaded."
        assert world.catalog.known("c")
        world.library.held.set()
        await world.until(lambda: set(world.announced.models) == {"a", "b", "c"})
        assert world.library.asked == ["/one"]


async def test_a_place_that_cannot_be_read_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tercet_frontend.models.announced._RETRY_FIRST", 0.01)
    async with following() as world:
        world.library.missing = {"/one"}
        # Another core of that name has it elsewhere.
        world.fleet.say(record("a"), record("b", "/two", "/two"))
        async with asyncio.timeout(TIMEOUT):
            while world.library.asked.count("/one") < 3:
                world.library.question.clear()
                await world.library.question.wait()
        assert set(world.announced.models) == {"b"}
        assert len([entry for entry in caplog.records if "cannot be loaded" in entry.message]) == 1
        world.fleet.say(record("a"))
        await world.settled()
        world.library.missing.clear()
        await world.until(lambda: "a" in world.announced.models)


async def test_the_reason_says_what_is_wrong() -> None:
    async with following() as world:
        world.library.missing = {"/one"}
        world.fleet.say(record("a"))
        await world.settled()
        assert world.catalog.missing() == "The tokenizer of a cannot be loaded: /one does not exist."


async def test_a_place_that_only_its_core_can_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as world:
        monkeypatch.setattr(world.library, "get", TextLibrary().get)
        world.fleet.say(record("a", "~nobody-of-this-name/model"))
        async with asyncio.timeout(TIMEOUT):
            while "cannot be loaded" not in (world.catalog.missing() or ""):
                await asyncio.wait({world.run}, timeout=0.01)
                assert not world.run.done()


async def test_cores_of_one_name_at_different_places() -> None:
    async with following() as world:
        world.library.missing = {"/host1/model"}
        world.library.fingerprints = {"/host2/model": "same"}
        world.fleet.say(record("a", "/host1/model", "same"), record("a", "/host2/model", "same"))
        await world.until(lambda: "a" in world.announced.models)
        assert world.catalog.names_of(Core(("a",), "same")) == ("a",)


async def test_a_text_that_is_not_that_of_its_cores_is_not_used() -> None:
    async with following() as world:
        world.fleet.say(record("a", "/one", "another"))
        await world.settled()
        assert dict(world.announced.models) == {}
        missing = world.catalog.missing() or ""
        assert "is not the one that its cores have" in missing


async def test_the_number_of_texts_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with following(most=2) as world:
        world.fleet.say(*(record(name, f"/{name}", f"/{name}") for name in "abc"))
        await world.until(lambda: len(world.announced.models) == 2)
        await world.settled()
        assert len(world.library.asked) == 2
        assert "more than 2 models" in caplog.text
        # What is not used makes room.
        left = next(name for name in "abc" if name not in world.announced.models)
        world.fleet.say(record(left, f"/{left}", f"/{left}"))
        await world.until(lambda: left in world.announced.models)
        assert len(world.announced.models) == 2


async def test_the_library_reads_a_checkpoint_once_while_somebody_has_it(tmp_path: Path) -> None:
    reads: list[str] = []

    def read(checkpoint: Checkpoint) -> Any:
        reads.append(str(checkpoint.source.path))
        return cast("Any", checkpoint)

    write_tiny_llama(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    library = TextLibrary(read)
    sources = [str(tmp_path / "model"), str(tmp_path / "link"), f"{tmp_path}/./model"]
    first, *others = await asyncio.gather(*(library.get(source) for source in sources))
    assert all(other is first for other in others)
    assert first.name == "model"
    assert len(reads) == 1
    # The thread that has read it may still be on its way out, and hold it until then.
    forgotten = asyncio.Event()
    weakref.finalize(first, asyncio.get_running_loop().call_soon_threadsafe, forgotten.set)
    del first, others
    await asyncio.wait_for(forgotten.wait(), TIMEOUT)
    await library.get(sources[0])
    assert len(reads) == 2
    with pytest.raises(CheckpointError):
        await library.get(str(tmp_path / "none"))


async def test_weights_are_not_needed(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "model")
    (source / "model.safetensors").unlink()
    model = await TextLibrary().get(str(source))
    assert model.text.tokenizer.encode("Paris")
