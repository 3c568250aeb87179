"""What depends on the kind of device: `Platform` says what that is, `choose_platform` makes the one asked for."""

from tercet_worker.platforms.choice import choose_platform
from tercet_worker.platforms.interface import ExecutorShape, KvMemory, Platform

__all__ = ["ExecutorShape", "KvMemory", "Platform", "choose_platform"]
