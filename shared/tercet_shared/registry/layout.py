"""What the registry keeps in Redis, and how it is written there.

| key | type | what |
|---|---|---|
| ``{prefix}:1:cores`` | sorted set | ids of cores; scores are the times of their heartbeats by their own clocks, ms |
| ``{prefix}:1:core:{id}`` | hash | the record of a core; expires unless it is refreshed |
| ``{prefix}:1:changes`` | stream | ids of cores that came, changed or left; the latest thousand or so |
| ``{prefix}:1:kv:{id}`` | stream | block events of a core; an entry's id is ``{life}-{number of its last event}`` |
| ``{prefix}:1:kv-snapshot:{id}`` | hash | all keys that were cached at some number: ``head`` and the pieces it names |
| ``{prefix}:1:route:{request id}`` | string | where a request runs, JSON; expires |

No command touches two keys that must be in one place, so a cluster may spread them as it likes. A core's *life* is the
time of its start in ms: its events are numbered from 1 in every life, and a greater life is a later one.

Times are never compared between machines: a front end watches whether a heartbeat changes, by its own clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from tercet_shared.errors import ProtocolError
from tercet_shared.registry.interface import CoreLoad, CoreRecord, CoreState, RouteRecord

VERSION = 1

MAX_CHANGES = 1_000
"""Announcements that are kept, about."""

_MOST = 2**53
"""No number of a record is greater: times in ms, counts."""

_MOST_TTL_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the registry's keys under one prefix."""

    prefix: str

    @property
    def cores(self) -> str:
        """Ids and heartbeats."""
        return f"{self.prefix}:{VERSION}:cores"

    @property
    def changes(self) -> str:
        """Announcements."""
        return f"{self.prefix}:{VERSION}:changes"

    def core(self, core_id: str) -> str:
        """Record of a core."""
        return f"{self.prefix}:{VERSION}:core:{core_id}"

    def blocks(self, core_id: str) -> str:
        """Block events of a core."""
        return f"{self.prefix}:{VERSION}:kv:{core_id}"

    def snapshot(self, core_id: str) -> str:
        """What a core had cached."""
        return f"{self.prefix}:{VERSION}:kv-snapshot:{core_id}"

    def route(self, request_id: str) -> str:
        """Route of a request."""
        return f"{self.prefix}:{VERSION}:route:{request_id}"


@dataclass(frozen=True, slots=True)
class StoredCore:
    """The hash of a core.

    Attributes:
        record: what it says of itself.
        life: see the module.
        ttl: seconds without a heartbeat after which it is gone.
    """

    record: CoreRecord
    life: int
    ttl: float

    def same_but_load(self, other: StoredCore) -> bool:
        """Returns whether the two differ in their load at most."""
        return replace(self, record=replace(self.record, load=other.record.load)) == other


def core_fields(core: StoredCore) -> dict[str | bytes, bytes | float | int | str]:
    """Returns the fields of a core's hash."""
    record, load = core.record, core.record.load
    return {
        "address": record.address,
        "incarnation": record.incarnation,
        "served_names": json.dumps(record.served_names),
        "source": record.source,
        "revision": record.revision,
        "model_fingerprint": record.model_fingerprint,
        "tokenizer_fingerprint": record.tokenizer_fingerprint,
        "block_size": record.block_size,
        "state": record.state.value,
        "running": load.running,
        "waiting": load.waiting,
        "pending_tokens": load.pending_tokens,
        "free_blocks": load.free_blocks,
        "life": core.life,
        "ttl_ms": int(core.ttl * 1e3),
    }


def core_of(core_id: str, fields: dict[bytes, bytes]) -> StoredCore:
    """Returns what a core's hash says. Raises `ProtocolError` when that makes no sense."""
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        names = _names(json.loads(text["served_names"]))
        load = CoreLoad(
            running=_number(text["running"]),
            waiting=_number(text["waiting"]),
            pending_tokens=_number(text["pending_tokens"]),
            free_blocks=_number(text["free_blocks"]),
        )
        record = CoreRecord(
            core_id=core_id,
            address=text["address"],
            incarnation=text["incarnation"],
            served_names=names,
            source=text["source"],
            revision=text["revision"],
            model_fingerprint=text["model_fingerprint"],
            tokenizer_fingerprint=text["tokenizer_fingerprint"],
            block_size=_number(text["block_size"], least=1),
            state=CoreState(text["state"]),
            load=load,
        )
        return StoredCore(record, _number(text["life"]), _number(text["ttl_ms"], 1, _MOST_TTL_MS) / 1e3)
    except (KeyError, ValueError, RecursionError):
        raise ProtocolError(f"What Redis says of core {core_id!r} makes no sense.") from None


def _number(text: str, least: int = 0, most: int = _MOST) -> int:
    number = int(text)
    if not least <= number <= most:
        raise ValueError
    return number


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


def encode_route(route: RouteRecord) -> bytes:
    """Returns what is kept of a route."""
    fields = {
        "core": route.core_id,
        "front_end": route.front_end,
        "attempt": route.attempt,
        "traceparent": route.traceparent,
        "state": route.state,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_route(raw: bytes) -> RouteRecord:
    """Returns the route. Raises `ProtocolError` when it makes no sense."""
    try:
        fields = json.loads(raw)
        return RouteRecord(
            core_id=str(fields["core"]),
            front_end=str(fields["front_end"]),
            attempt=int(fields["attempt"]),
            traceparent=str(fields["traceparent"]),
            state=str(fields["state"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ProtocolError("The route in Redis makes no sense.") from None
