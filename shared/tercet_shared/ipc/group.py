"""Rings that several workers read: a core writes each frame once, and every rank of a group on its host gets it.

A `Place` in the verdict over a hello says to which group a worker belongs and which reader of its rings it is. The
listener makes the rings for the first who comes; the last who leaves closes them. Places are taken until the first
frame is sent. From then on those that nobody holds (ranks on other hosts) do not count as readers, and one that becomes
free is not given away again: who comes later would miss what was sent before.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tercet_shared.errors import LinkError
from tercet_shared.ipc.channel import RingSender
from tercet_shared.ipc.layout import RingMemory
from tercet_shared.ipc.link import Stream
from tercet_shared.ipc.ring import RingDescriptors, RingWriter, create_ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_shared.ipc.channel import ErrorCallback
    from tercet_shared.ipc.ring import Frame
    from tercet_shared.ipc.settings import ListenerSettings, RingSettings


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in a group.

    Attributes:
        group: names the group; the same for all of its workers.
        index: which of the places it is, from 0.
        places: how many there are, those on other hosts included.
    """

    group: str
    index: int
    places: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.places:
            raise ValueError(f"there is no place {self.index} among {self.places}")


def create_ring_to_workers(name: str, settings: RingSettings, readers: int = 1) -> tuple[RingDescriptors, RingWriter]:
    """Makes a ring and opens its writing end, which owns the doorbells; the caller owns the memfd too.

    Raises:
        ConfigurationError: a number is out of range.
        OSError: out of descriptors or memory; nothing is left behind.
    """
    ring = create_ring(name, capacity=settings.capacity, max_frame=settings.max_frame, readers=readers)
    try:
        return ring, RingWriter(RingMemory(ring.memory), ring.data, ring.space)
    except OSError:
        ring.close()
        raise


PassedRing: TypeAlias = tuple[int, int, int]
"""Descriptors of a ring that one reader is given: memory, data doorbell, space doorbell."""


class GroupRings:
    """The plan ring and the mask ring of one group.

    Args:
        places: readers of each.
        settings: sizes of the rings.
        on_unused: called when the last place has become free and the rings are closed.
    """

    def __init__(self, places: int, settings: ListenerSettings, on_unused: Callable[[], object]) -> None:
        self.places: Final = places
        self._on_unused = on_unused
        self._held: dict[int, list[ErrorCallback]] = {}  # by index: who is told of a broken ring
        self._memories = ExitStack()  # the memfds, until no worker can come any more
        self._begun = False  # whether a frame was sent
        self._rings: list[RingDescriptors] = []
        self._senders: dict[Stream, RingSender] = {}
        with ExitStack() as undo:
            undo.callback(self._memories.close)
            for stream, name, sizes in (
                (Stream.STEPS, "tercet-plan", settings.plan),
                (Stream.MASKS, "tercet-mask", settings.mask),
            ):
                ring, writer = create_ring_to_workers(name, sizes, places)
                self._memories.callback(os.close, ring.memory)
                self._rings.append(ring)
                self._senders[stream] = RingSender(writer, self._tell_all)
                undo.callback(writer.close)
            undo.pop_all()

    def take(self, place: Place) -> None:
        """Takes a place; whoever does releases it.

        Raises:
            LinkError: it is taken, the group has another number of places, or has begun to work. Not for the first.
        """
        if place.places != self.places:
            raise LinkError(f"there is no place {place.index} of {place.places} in a group of {self.places}")
        if self._begun:
            raise LinkError("the group has begun to work")
        if place.index in self._held:
            raise LinkError(f"place {place.index} of the group is taken")
        self._held[place.index] = []

    def descriptors(self, index: int) -> tuple[PassedRing, PassedRing]:
        """Returns what one reader is given of the plan ring and of the mask ring.

        They belong to the rings; they are to be passed on before the first frame is sent.
        """
        plan, mask = ((ring.memory, ring.data[index], ring.space[index]) for ring in self._rings)
        return plan, mask

    def release(self, index: int) -> None:
        """Gives a place back. Idempotent."""
        if self._held.pop(index, None) is None:
            return
        if self._held:
            if self._begun:
                for sender in self._senders.values():
                    sender.detach_reader(index)
            return
        for sender in self._senders.values():
            sender.close()
        self._memories.close()
        self._on_unused()

    def end(self, stream: Stream, index: int, on_error: ErrorCallback) -> GroupEnd:
        """Returns what the holder of a place sends through; ``on_error`` is told when a ring is broken."""
        self._held[index].append(on_error)
        return GroupEnd(self, self._senders[stream], index)

    def begin(self) -> None:
        """From here on, who holds no place is no reader."""
        if self._begun:
            return
        self._begun = True
        self._memories.close()
        for index in range(self.places):
            if index not in self._held:
                for sender in self._senders.values():
                    sender.detach_reader(index)

    def _tell_all(self, error: LinkError) -> None:
        for tell in [tell for callbacks in self._held.values() for tell in callbacks]:
            tell(error)


class GroupEnd:
    """What one connection of a group holds of a sending end: as `RingSender`, but a frame reaches all of the group."""

    def __init__(self, rings: GroupRings, sender: RingSender, index: int) -> None:
        self._rings = rings
        self._sender = sender
        self._index = index

    @property
    def pending(self) -> int:
        """Frames not completely in the ring yet."""
        return self._sender.pending

    def send(self, frame: Frame) -> None:
        """Sends ``frame`` to the whole group. See `RingSender.send`."""
        self._rings.begin()
        self._sender.send(frame)

    def try_send(self, frame: Frame) -> bool:  # noqa: ARG002  # see `Sender`
        """Returns False: who belongs to the group is a matter of the loop."""
        return False

    def close(self) -> None:
        """Gives the place in the group back. Idempotent."""
        self._rings.release(self._index)
