"""What ranks say when they end, and which of it says why the group ended. Imports no torch."""

from __future__ import annotations

from typing import Final

LOST_PEERS: Final = "A rank lost the others of its group"
LOST_RENDEZVOUS: Final = "The rendezvous ended before all ranks had met"
LOST_CORE: Final = "The link to the core is closed"


def is_consequence(message: str) -> bool:
    """Returns whether a rank ended because of something that another one, or the core, can say better."""
    return message.startswith((LOST_PEERS, LOST_RENDEZVOUS, LOST_CORE))
