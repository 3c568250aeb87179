"""What a core tells of its cached prefixes, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tercet_shared.errors import ProtocolError
from tercet_shared.hashing import KEY_BYTES, BlockKey
from tercet_shared.registry.interface import BlockBatch

if TYPE_CHECKING:
    from tercet_proto.v1 import engine_pb2

_STORED, _REMOVED, _CLEARED = range(3)


def block_batches(events: engine_pb2.BlockEvents) -> list[BlockBatch]:
    """Returns the changes in order: a snapshot, or changes, or both where all keys were cleared in between.

    Raises:
        ProtocolError: they are malformed.
    """
    raw = events.keys
    count, rest = divmod(len(raw), KEY_BYTES)
    changes = np.frombuffer(events.changes, "u1")
    if rest or len(changes) != (0 if events.snapshot else count):
        raise ProtocolError("The columns of block events differ in length.")
    if len(changes) and changes.max() > _CLEARED:
        raise ProtocolError("A block event is of an unknown kind.")
    keys = [BlockKey(raw[at : at + KEY_BYTES]) for at in range(0, len(raw), KEY_BYTES)]
    if events.snapshot:
        return [BlockBatch(events.first, (), keys, snapshot=True)]
    batches = []
    begin = 0
    cleared = np.flatnonzero(changes == _CLEARED)
    if len(cleared):  # what came before the last of them has no meaning any more
        begin = int(cleared[-1]) + 1
        batches.append(BlockBatch(events.first + begin - 1, (), (), snapshot=True))
    if begin < count:
        stored = (changes[begin:] == _STORED).tolist()
        batches.append(BlockBatch(events.first + begin, stored, keys[begin:]))
    return batches
