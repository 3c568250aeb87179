"""API keys in a file, JSON or TOML: ``{"keys": [{"name": …, "hash": …, …}, …]}``."""

from __future__ import annotations

import logging
import tomllib
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from tercet_frontend.access.keys import ApiKey  # noqa: TC001  # pydantic reads the annotation
from tercet_frontend.access.watch import FileWatch
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

logger = logging.getLogger(__name__)


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: list[ApiKey]


class KeyRing:
    """Keys by their digest.

    A look-up takes the same path for every digest: the dictionary's own hash is keyed by a secret of the process, and
    what it finds is compared in constant time. Besides, what is timed here is the hash of a key and not the key.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, digest: bytes) -> ApiKey | None:
        """Returns the key with that SHA-256, or None."""
        key = self._keys.get(digest)
        return key if key is not None and compare_digest(key.digest, digest) else None


class KeyFile:
    """The keys of a file, as it is now: read again when it has changed. A file with a mistake changes nothing.

    Raises:
        ConfigurationError: there is no such file, or it has a mistake.
    """

    def __init__(
        self, path: Path, *, watch: FileWatch | None = None, reloaded: Callable[[str], None] = lambda _outcome: None
    ) -> None:
        """Reads the file.

        Args:
            path: its suffix says what it is: ``.toml``, otherwise JSON.
            watch: says when it has changed.
            reloaded: is told, in one sentence, what came of each later attempt.
        """
        self._path = path
        self._watch = FileWatch([path]) if watch is None else watch
        self._reloaded = reloaded
        self._ring = KeyRing(read_keys(path))

    def find(self, digest: bytes) -> ApiKey | None:
        """Returns the key with that SHA-256, or None."""
        if self._watch.changed():
            self.reload()
        return self._ring.find(digest)

    def reload(self) -> None:
        """Reads the file again."""
        self._watch.note()
        try:
            self._ring = KeyRing(read_keys(self._path))
        except ConfigurationError as error:
            outcome = f"{error.message} The keys stay as they were."
            logger.warning("%s", outcome)
        else:
            outcome = f"The file {self._path} was read again; it has {len(self._ring)} API keys."
            logger.info("%s", outcome)
        self._reloaded(outcome)


def read_keys(path: Path) -> list[ApiKey]:
    """Returns the keys in a file.

    Raises:
        ConfigurationError: it cannot be read, is not what its suffix says, or an entry has a mistake.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _mistake(path, f"cannot be read: {error.strerror}") from None
    try:
        keys = _Content.model_validate(_parsed(path, raw)).keys
    except ValueError as error:
        raise _mistake(path, _sentence(error)) from None
    for field in ("name", "hash"):
        seen: set[str] = set()
        for index, key in enumerate(keys):
            value = getattr(key, field)
            if value in seen:
                raise _mistake(path, f"is wrong: keys[{index}] has the {field} of another")
            seen.add(value)
    return keys


def _parsed(path: Path, raw: bytes) -> Any:
    return tomllib.loads(raw.decode()) if path.suffix.lower() == ".toml" else orjson.loads(raw)


def _sentence(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return f"cannot be read: {error}"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    text = first["msg"].removeprefix("Value error, ")
    return f"is wrong: {place}: {text}" if place else f"is wrong: {text}"


def _mistake(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"The file of API keys {path} {what}.", param="api_keys_file")
