"""Requests of several lengths whose answers are known."""

from __future__ import annotations

from tercet_proto.v1 import engine_pb2 as pb
from tests.fakes.stream_client import Client
from tests.fakes.worker import expected

PROMPTS = {handle: [handle + 3] * (1 + 23 * handle) for handle in range(8)}
LENGTHS = {handle: 20 + 15 * handle for handle in range(8)}


async def submit_all(client: Client) -> None:
    for handle, prompt in PROMPTS.items():
        await client.submit(handle, prompt, max_tokens=LENGTHS[handle])


def check_all(client: Client) -> None:
    """All have ended, as they should and once."""
    for handle, prompt in PROMPTS.items():
        choice = client.choices[handle]
        assert choice.tokens == expected(prompt, LENGTHS[handle])
        assert (choice.reason, choice.terminal_events, choice.error) == (pb.FINISH_REASON_LENGTH, 1, None)
