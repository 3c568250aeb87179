"""What a front end makes of a core's block events: the plainest follower that keeps to `BlockSink`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tercet_shared.hashing import BlockKey
from tercet_shared.registry.interface import BlockBatch


@dataclass
class Mirror:
    """One core; ``keys`` is None while nothing is known of it."""

    incarnation: str = ""
    number: int = 0
    keys: set[BlockKey] | None = None
    voids: int = 0

    def take(self, incarnation: str, batch: BlockBatch) -> None:
        self.incarnation = incarnation
        if batch.snapshot:
            assert not batch.stored
            assert len(set(batch.keys)) == len(batch.keys), "a key twice in a snapshot"
            self.keys, self.number = set(batch.keys), batch.first
            return
        assert len(batch.stored) == len(batch.keys) > 0
        if self.keys is None or batch.first != self.number + 1:
            self.keys = None
            self.voids += 1
            return
        for stored, key in zip(batch.stored, batch.keys, strict=True):
            if stored:
                assert key not in self.keys, "stored twice"
                self.keys.add(key)
            else:
                self.keys.remove(key)
        self.number += len(batch.keys)


@dataclass
class Mirrors:
    """Many cores: a `BlockSink`."""

    cores: dict[str, Mirror] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def blocks(self, core_id: str, incarnation: str, batch: BlockBatch) -> None:
        self.cores.setdefault(core_id, Mirror()).take(incarnation, batch)

    def forget(self, core_id: str) -> None:
        self.forgotten.append(core_id)
        self.cores.pop(core_id, None)
