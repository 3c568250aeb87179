"""What can go wrong with a link, refined from ``tercet_shared.errors``.

LinkError
├── LinkClosedError        the link is closed; says why
├── LinkUnavailableError   nobody accepts links at that path now; trying again later makes sense
├── LinkRejectedError      the other side answered, and refused; trying again with the same hello does not
├── FrameTooLargeError     the sender was handed a frame over the ring's limit; the link lives on
└── ProtocolError
    └── CorruptRingError   shared memory or a doorbell holds what no correct peer writes
"""

from __future__ import annotations

from tercet_shared.errors import LinkError, ProtocolError


class LinkClosedError(LinkError):
    """The link is closed. The text is the reason."""


class LinkUnavailableError(LinkError):
    """No process accepts links at the path now."""


class LinkRejectedError(LinkError):
    """The listener refused the hello. The text is its reason."""


class FrameTooLargeError(LinkError):
    """A frame is over the ring's limit. Nothing of it was written."""


class CorruptRingError(ProtocolError):
    """Shared memory or a doorbell holds what no correct peer writes. The ring cannot be used any more."""
