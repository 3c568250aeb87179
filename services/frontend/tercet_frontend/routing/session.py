"""Keeps what belongs together on one core: rendezvous hashing over the sessions.

Every core draws a number for every session, out of both names; the highest takes it (Thaler and Ravishankar, "A
name-based mapping scheme for rendezvous", 1996). So a core that leaves moves its own sessions only, one that joins
takes its share from all, and front ends agree without a word. A core that has just failed, or that has no slot free and
more than its share of the load, is passed over for the next highest (after Mirrokni, Thorup and Zadimoghaddam,
"Consistent hashing with bounded loads", 2016), and gets its sessions back when it has room. Requests without a session
go to the least loaded core.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tercet_frontend.routing.choice import Choice
from tercet_frontend.routing.columns import PASSED_OVER_MS
from tercet_frontend.routing.least_loaded import LeastLoaded

if TYPE_CHECKING:
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.routing.columns import U64, CoreColumns, Group

_SHARE = 1.25
"""How much more than its share of the load a core may have while it has no slot free."""


class Session:
    """See the module."""

    sink = None

    def __init__(self) -> None:
        self._others = LeastLoaded()

    def choose(self, request: GenerationRequest, group: Group, columns: CoreColumns, now: float) -> Choice:
        """See `RoutingPolicy.choose`."""
        if not request.session:
            return self._others.choose(request, group, columns, now)
        rows, at = group.rows, group.at
        # Of different tenants, the same word is not the same session.
        name = f"{request.tenant}\0{request.session}".encode()
        session = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        drawn = _mixed(columns.ident[at] ^ np.uint64(session))
        load, slots = columns.load[at] + 1.0, columns.slots[at]
        share = _SHARE * float(load.sum()) / float(slots.sum())
        # Not all loads can be above their share, so there is always a core.
        passed = (load > np.maximum(slots, share * slots)) | (columns.shun_ms(at, now) > PASSED_OVER_MS)
        if passed.all():
            passed[:] = False
        drawn[passed] = 0
        return Choice(int(rows[drawn.argmax()]), len(request.prompt_ids))


def _mixed(values: U64) -> U64:
    """Returns values in which every bit depends on every bit (the finalizer of MurmurHash3), in place."""
    shift = np.uint64(33)
    values ^= values >> shift
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> shift
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> shift
    return values
