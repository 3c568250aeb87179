"""Numbers of a link: sizes, limits, times. The core's apply; a worker learns those that it needs in the handshake."""

from __future__ import annotations

from dataclasses import dataclass, field

from tercet_shared.errors import ConfigurationError

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RingSettings:
    """Size of one ring.

    Attributes:
        capacity: bytes of data, rounded up to whole pages. Pages take memory once they have been written to.
        max_frame: bytes of the largest frame. A frame above a quarter of the capacity travels in fragments.
    """

    capacity: int = 4 * _MIB
    max_frame: int = 64 * _MIB

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.max_frame < 1:
            raise ConfigurationError("ring capacity and frame limit must be positive")


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """How the sides of a link watch each other beside the socket's EOF.

    Attributes:
        interval_s: seconds between heartbeats.
        dead_after_s: seconds of silence after which the other side counts as dead; at least two intervals.
    """

    interval_s: float = 1.0
    dead_after_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.interval_s <= self.dead_after_s / 2 < float("inf"):
            raise ConfigurationError(
                f"heartbeat: {self.dead_after_s} s of silence must be at least two intervals of {self.interval_s} s"
            )


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """What a core allows and gives to those who connect.

    Attributes:
        plan, result, mask: the three rings of a connection.
        heartbeat: applied by both sides.
        handshake_timeout_s: seconds within which a peer must have sent its hello and taken the answer.
        max_hello: bytes of the largest hello.
        max_handshakes: handshakes in progress at once; further connections wait in the socket's backlog.
        mode: permissions of the socket.
        group: group (name or number) that the socket is given; None leaves the process's own.
    """

    plan: RingSettings = field(default_factory=RingSettings)
    result: RingSettings = field(default_factory=RingSettings)
    mask: RingSettings = field(default_factory=lambda: RingSettings(capacity=8 * _MIB))
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    handshake_timeout_s: float = 5.0
    max_hello: int = 64 * 1024
    max_handshakes: int = 16
    mode: int = 0o660
    group: str | int | None = None
