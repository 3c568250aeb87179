"""One API key: who its holder is, and what that holder may do."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

HASH_PREFIX = "sha256:"
"""What the hash of a key begins with.

A key is 256 random bits, which nobody finds by trying, however fast a hash is; a slow hash would only protect keys that
people make up, and would cost every request a millisecond.
"""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
_MAX_MODELS = 1_000


def _listed(value: object) -> object:
    """Returns the names in a text with commas or a JSON list: in Redis every value is a text."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",") if part.strip()]


Name = Annotated[str, Field(pattern=f"^{_NAME}$")]
"""Of a key or tenant: short, and safe in logs and keys of Redis; no slash (see `make_job`)."""

_Limit = Annotated[int, Field(ge=1, le=10**12)]
_Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class ApiKey(BaseModel):
    """A key as it is kept: by its hash."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    name: Name = Field(description="What logs call the key; unique.")
    hash: str = Field(pattern=f"^{HASH_PREFIX}[0-9a-f]{{64}}$", description="SHA-256 of the key.")
    tenant: Name | None = Field(None, description="Whose key it is; by default the name's. Keys may share one.")
    models: Annotated[tuple[str, ...], BeforeValidator(_listed), Field(max_length=_MAX_MODELS)] = Field(
        (), description="Models that it may use, also as patterns (``smol-*``); none means all."
    )
    max_concurrent: _Limit | None = Field(None, description="Requests at once.")
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = Field(None, description="Of prompts and outputs together.")
    priority: _Priority = Field(0, description="Of requests that name none; smaller is served first.")
    best_priority: _Priority | None = Field(None, description="The smallest that a request may name.")
    expires: AwareDatetime | None = Field(None, description="From then on the key is refused.")
    disabled: bool = False

    @model_validator(mode="before")
    @classmethod
    def _no_plain_keys(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "key" in raw:
            raise ValueError("keys are kept by their hash only; `tercet key hash` makes one of a key")
        return raw

    @model_validator(mode="after")
    def _default_is_allowed(self) -> ApiKey:
        if self.best_priority is not None and self.priority < self.best_priority:
            raise ValueError("priority is smaller than best_priority")
        return self

    @cached_property
    def digest(self) -> bytes:
        """The 32 bytes of the hash."""
        return bytes.fromhex(self.hash.removeprefix(HASH_PREFIX))

    @cached_property
    def owner(self) -> str:
        """The tenant."""
        return self.name if self.tenant is None else self.tenant

    @cached_property
    def limited(self) -> bool:
        """Whether anything about its requests is counted."""
        return (self.max_concurrent, self.requests_per_minute, self.tokens_per_minute) != (None, None, None)

    def expired(self, now: datetime | None = None) -> bool:
        """Returns whether the key has expired at ``now``, by default the present."""
        return self.expires is not None and self.expires <= (datetime.now(UTC) if now is None else now)

    def may_use(self, model: str) -> bool:
        """Returns whether it may use the model of that name."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


def unlimited_key(name: str, digest: bytes = bytes(32)) -> ApiKey:
    """Returns a key without limits; an empty name for nobody in particular."""
    return ApiKey.model_construct(name=name, hash=HASH_PREFIX + digest.hex())


ANONYMOUS = unlimited_key("")
"""Everybody, where no keys are asked for."""
