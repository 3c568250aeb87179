"""Responses that clients may come back to: kept in the process, or in Redis where several front ends serve them."""

from tercet_frontend.conversations.interface import ResponseStore, StoredResponse
from tercet_frontend.conversations.memory import MemoryResponses
from tercet_frontend.conversations.redis import RedisResponses

__all__ = ["MemoryResponses", "RedisResponses", "ResponseStore", "StoredResponse"]
