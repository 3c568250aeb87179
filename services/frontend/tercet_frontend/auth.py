"""API keys: who may call, and as which tenant."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING

from tercet_shared.errors import AuthenticationError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEME = b"bearer"


class ApiKeys:
    """The keys that are accepted; only their hashes are kept. Without any key everybody is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Takes the keys.

        Raises:
            ConfigurationError: a key is empty, or has characters that a header cannot carry.
        """
        self._digests: list[bytes] = []
        for key in keys:
            if not key.isascii() or not key.isprintable() or key != key.strip() or not key:
                raise ConfigurationError(
                    "An API key must be printable ASCII, not empty, without spaces around it.", param="api_key"
                )
            self._digests.append(sha256(key.encode()).digest())

    def tenant(self, authorization: bytes | None) -> str:
        """Returns who sends this ``Authorization`` header: a name derived from the key; empty without keys.

        Raises:
            AuthenticationError: no key, or none that is accepted.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").strip().partition(b" ")
        if scheme.lower() != _SCHEME or not key.strip():
            raise AuthenticationError("No API key was sent; it belongs in the header 'Authorization: Bearer KEY'.")
        digest = sha256(key.strip()).digest()
        # Every digest is compared, in constant time, so that the answer's delay says nothing about the keys.
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        if not any(known):
            raise AuthenticationError("The API key is not valid.")
        return sha256(b"tenant" + digest).hexdigest()[:16]
