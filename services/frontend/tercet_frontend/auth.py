"""API keys: who may call. They come from flags, from a file and from Redis; this looks in all of them."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from tercet_frontend.access.key_file import KeyRing
from tercet_frontend.access.keys import ANONYMOUS, ApiKey, unlimited_key
from tercet_shared.errors import AuthenticationError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEME = b"bearer"
_MAX_LENGTH = 4_096


class KeySource(Protocol):
    """Keys that are in this process."""

    def find(self, digest: bytes) -> ApiKey | None:
        """Returns the key with that SHA-256, or None."""


class RemoteKeySource(Protocol):
    """Keys that are elsewhere."""

    async def find(self, digest: bytes) -> ApiKey | None:
        """Returns the key with that SHA-256, or None. Raises `UnavailableError` when it cannot be told."""


class ApiKeys:
    """The keys that are accepted; only their hashes are kept. Without any key or source everybody is accepted."""

    def __init__(
        self, keys: Iterable[str] = (), *, file: KeySource | None = None, remote: RemoteKeySource | None = None
    ) -> None:
        """Takes the keys.

        Args:
            keys: as clients send them; without limits.
            file: more of them, in a file.
            remote: more of them, asked last.

        Raises:
            ConfigurationError: a key is empty, or has characters that a header cannot carry.
        """
        plain: list[ApiKey] = []
        for key in keys:
            if not key.isascii() or not key.isprintable() or key != key.strip() or not key:
                raise ConfigurationError(
                    "An API key must be printable ASCII, not empty, without spaces around it.", param="api_key"
                )
            digest = sha256(key.encode()).digest()
            plain.append(unlimited_key(sha256(b"tenant" + digest).hexdigest()[:16], digest))
        self._local: list[KeySource] = [KeyRing(plain)] if plain else []
        if file is not None:
            self._local.append(file)
        self._remote = remote

    @property
    def asked_for(self) -> bool:
        """Whether clients have to send one."""
        return bool(self._local) or self._remote is not None

    async def find(self, authorization: bytes | None, api_key: bytes | None = None) -> ApiKey:
        """Returns the key that comes with these headers; `ANONYMOUS` where none is asked for.

        Args:
            authorization: the header ``Authorization``.
            api_key: the header ``X-Api-Key``, as Anthropic's clients send it; counts where the other is absent.

        Raises:
            AuthenticationError: no key, or none that is accepted.
            UnavailableError: it is not known here, and elsewhere cannot be asked.
        """
        if not self.asked_for:
            return ANONYMOUS
        digest = sha256(_sent_key(authorization, api_key)).digest()
        key = None
        for source in self._local:
            key = key or source.find(digest)
        if key is None and self._remote is not None:
            key = await self._remote.find(digest)
        if key is None:
            raise AuthenticationError("The API key is not valid.")
        if key.disabled:
            raise AuthenticationError("The API key is disabled.")
        if key.expired():
            raise AuthenticationError("The API key has expired.")
        return key


def _sent_key(authorization: bytes | None, api_key: bytes | None) -> bytes:
    scheme, _, key = (authorization or b"").strip().partition(b" ")
    if authorization is None and api_key is not None:
        scheme, key = _SCHEME, api_key
    key = key.strip()
    if scheme.lower() != _SCHEME or not key:
        raise AuthenticationError(
            "No API key was sent; it belongs in the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'."
        )
    if len(key) > _MAX_LENGTH:
        raise AuthenticationError("The API key is not valid.")
    return key
