"""What a core tells its fleet, what a front end learns of it, and the two interfaces between which both stand.

Nothing here is on the token path. Calls that reach a server have timeouts; when they fail, what was known last stays,
and a counter says so. There are two implementations: `tercet_shared.registry.redis`, and
`tercet_shared.registry.static`, where the cores' addresses are given and everything else is taken from the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tercet_shared.hashing import BlockKey


class CoreState(Enum):
    """Whether a core takes requests; one that is gone has no record."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """How loaded a core said it was."""

    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0
    free_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRecord:
    """What a core says of itself.

    Attributes:
        core_id: its name; no two cores that are alive have the same.
        address: for front ends, as ``host:port`` or ``unix:/path``.
        incarnation: of its KV state; with a new one all its cached prefixes are gone.
        served_names: under which its model may be asked for, at least one.
        source: directory, file or hub id of the model, from which a front end may read its tokenizer.
        revision: branch, tag or commit of a hub model, or empty.
        model_fingerprint: of the model, as in `tercet_shared.hashing.root_key`.
        tokenizer_fingerprint: of its tokenizer.
        block_size: tokens per block of its KV cache.
        state: whether it takes requests.
        load: how loaded it is.
    """

    core_id: str
    address: str
    incarnation: str
    served_names: tuple[str, ...]
    source: str
    revision: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: int
    state: CoreState
    load: CoreLoad


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Changes of what a core has cached.

    Attributes:
        first: number of the first event; of a snapshot: of the last event that it includes.
        stored: ``True`` for each key that was stored, ``False`` for each that was removed; empty in a snapshot.
        keys: what was stored or removed, in order; of a snapshot: all that are cached.
        snapshot: the keys replace what was known.

    That all keys are gone is a snapshot without keys.
    """

    first: int
    stored: Sequence[bool]
    keys: Sequence[BlockKey]
    snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRecord:
    """Where a request runs.

    Attributes:
        core_id: on which core.
        front_end: by which front end.
        attempt: how often it was submitted before.
        traceparent: W3C trace context, or empty.
        state: ``running``, ``finished``, ``failed`` or ``aborted``.
    """

    core_id: str
    front_end: str
    attempt: int
    traceparent: str
    state: str


class BlockSink(Protocol):
    """Who wants to know what cores have cached. Methods are called on the event loop and return at once."""

    def blocks(self, core_id: str, incarnation: str, batch: BlockBatch) -> None:
        """Changes of one core. Numbers may have gaps: then what is known of the core is void until a snapshot."""

    def forget(self, core_id: str) -> None:
        """The core is gone."""


class Fleet(Protocol):
    """What a front end asks of the registry."""

    async def run(self) -> None:
        """Keeps the picture current until cancelled. Failures of the server never end it."""

    def cores(self) -> Mapping[str, CoreRecord | None]:
        """Returns the cores that may be reached, by address; the record is None where only the address is known."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called whenever `cores` answers differently, load aside."""

    def note_route(self, request_id: str, route: RouteRecord) -> None:
        """Writes down where a request runs, some time soon; never waits, never raises."""

    async def find_route(self, request_id: str) -> RouteRecord | None:
        """Returns where a request runs, or None where that is not known.

        Raises:
            UnavailableError: asking fails.
        """

    @property
    def healthy(self) -> bool:
        """Whether the picture is current, as far as the server is concerned."""
