"""Nobody's grammars hold up those of others: tenants take turns, small ones come first, a place is left for each."""

from __future__ import annotations

import asyncio

from tercet_core.grammar.turns import LARGE, Turns


class Queue:
    """Those who wait for a place, and who has one."""

    def __init__(self, places: int = 2) -> None:
        self.turns = Turns(places)
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, tenant: str = "", size: int = 100) -> None:
        async def stay() -> None:
            await self.turns.wait(tenant, size)
            self.inside.append(name)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.inside.remove(name)
                self.turns.leave(tenant, size)

        self._tasks[name] = asyncio.create_task(stay())
        await self.settle()

    async def go(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def order(self) -> list[str]:
        """Lets all go, the longest first; returns in which order they had their turn."""
        seen: list[str] = []
        while self.inside:
            seen += [name for name in self.inside if name not in seen]
            await self.go(self.inside[0])
        assert seen[-1:] == [] or not self.turns._waiting
        assert not self.turns._taken.total() + self.turns._large + len(self.turns._served)
        return seen


async def test_the_smallest_comes_first() -> None:
    queue = Queue()
    for name, size in (("a", 9), ("b", 9), ("long", 900), ("short", 1), ("other", 1)):
        await queue.come(name, size=size)
    assert queue.inside == ["a", "b"]
    assert await queue.order() == ["a", "b", "short", "other", "long"]


async def test_large_ones_leave_a_place() -> None:
    queue = Queue()
    for name in ("large 1", "large 2", "large 3"):
        await queue.come(name, size=LARGE + 1)
    assert queue.inside == ["large 1"]
    await queue.come("small")
    assert queue.inside == ["large 1", "small"]
    await queue.come("next")
    assert await queue.order() == ["large 1", "small", "next", "large 2", "large 3"]


async def test_a_tenant_leaves_a_place_to_others() -> None:
    queue = Queue()
    for name in ("a1", "a2", "a3"):
        await queue.come(name, "a")
    assert queue.inside == ["a1"]
    await queue.come("b1", "b", size=LARGE)
    assert queue.inside == ["a1", "b1"]


async def test_tenants_take_turns() -> None:
    queue = Queue(3)
    for name in ("a1", "a2", "a3", "a4"):
        await queue.come(name, "a")
    for name in ("b1", "c1", "b2", "c2"):
        await queue.come(name, name[0], size=LARGE)
    assert await queue.order() == ["a1", "a2", "b1", "c1", "a3", "b2", "c2", "a4"]


async def test_who_leaves_early_takes_nothing_along() -> None:
    queue = Queue()
    for name in ("a", "b", "c", "d"):
        await queue.come(name)
    await queue.go("c")
    assert await queue.order() == ["a", "b", "d"]


async def test_who_leaves_when_called_gives_the_place_on() -> None:
    turns = Turns(2)
    await turns.wait("", 1)
    await turns.wait("", 1)
    first, second = (asyncio.create_task(turns.wait("", 1)) for _ in range(2))
    await asyncio.sleep(0)
    turns.leave("", 1)
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled()
    assert not second.cancelled()
