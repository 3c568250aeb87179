"""What the streams to the cores are set to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tercet_shared.config import Common

PROTOCOL_VERSION = 1
"""Of ``tercet.v1`` as this package speaks it; Hello and Welcome carry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Settings of one stream; times in seconds.

    Attributes:
        heartbeat_interval: a frame is sent at least this often.
        heartbeat_timeout: silence after which the core counts as dead.
        connect_timeout: one attempt to connect.
        backoff_first: before the second attempt; doubles with each failure.
        backoff_limit: longest wait between attempts.
        max_message_bytes: largest frame in either direction.
    """

    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 3.0
    connect_timeout: float = 5.0
    backoff_first: float = 0.05
    backoff_limit: float = 2.0
    max_message_bytes: int = 32 * 1024 * 1024

    @classmethod
    def of(cls, settings: Common) -> StreamOptions:
        """Returns the options that a service's settings ask for."""
        return cls(
            heartbeat_interval=settings.heartbeat_interval,
            heartbeat_timeout=settings.heartbeat_timeout,
            max_message_bytes=int(settings.max_message_bytes),
        )

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Returns gRPC's channel arguments."""
        return [
            # The default, 4 MiB, would end the whole stream at the first larger message.
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # Below the heartbeats, which also notice a core whose process hangs.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # A new attempt shall be a new connection, not gRPC's memory of the one that failed.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
        ]
