"""What the streams to the cores are set to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet_frontend.cores.pace import Pace
from tercet_shared.mtls import channel_options, mutual_tls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_shared.config import FrontendSettings
    from tercet_shared.mtls import MutualTls

PROTOCOL_VERSION = 2
"""Of ``tercet.v1`` as this package speaks it best; Hello and Welcome carry it."""

OLDEST_PROTOCOL = 1
"""The oldest version that it speaks as well, so that front ends and cores can be replaced one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Settings of the streams and of what happens when one is lost; times in seconds.

    Attributes:
        heartbeat_interval: a frame is sent at least this often.
        heartbeat_timeout: silence after which the core counts as dead.
        connect_timeout: one attempt to connect.
        backoff_first: before the second attempt, of a connection or of a request; doubles with each failure.
        backoff_limit: longest wait between attempts.
        max_message_bytes: largest frame in either direction.
        max_attempts: cores that may be lost while they run a request before it is given up.
        migration_timeout: how long a request that lost its core may wait for another one.
        stall_timeout: how long a core may be without a worker before its requests are moved, if another has the model.
        linger: how long the stream to a core that left the registry is kept while it works and has nothing to do.
        pace: of all streams of the front end.
        tls: certificates for channels that leave the machine; None connects in plain text.
        tls_arguments: gRPC's channel arguments for them.
    """

    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 3.0
    connect_timeout: float = 5.0
    backoff_first: float = 0.05
    backoff_limit: float = 2.0
    max_message_bytes: int = 32 * 1024 * 1024
    max_attempts: int = 3
    migration_timeout: float = 30.0
    stall_timeout: float = 3.0
    linger: float = 10.0
    pace: Pace = field(default_factory=Pace)
    tls: MutualTls | None = None
    tls_arguments: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, settings: FrontendSettings) -> StreamOptions:
        """Returns the options that the front end's settings ask for.

        Raises:
            ConfigurationError: the certificates cannot be used.
        """
        return cls(
            heartbeat_interval=settings.heartbeat_interval,
            heartbeat_timeout=settings.heartbeat_timeout,
            stall_timeout=settings.heartbeat_timeout,  # the worker is to its core what the core is to us
            max_message_bytes=int(settings.max_message_bytes),
            max_attempts=settings.max_attempts,
            migration_timeout=settings.migration_timeout,
            pace=Pace(settings.max_event_rate),
            tls=mutual_tls(settings),
            tls_arguments=channel_options(settings),
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
