"""API keys."""

from __future__ import annotations

import pytest

from tercet_frontend.auth import ApiKeys
from tercet_shared.errors import AuthenticationError, ConfigurationError


def test_without_keys_everybody_is_served() -> None:
    keys = ApiKeys([])
    assert keys.tenant(None) == ""
    assert keys.tenant(b"Bearer anything") == ""


@pytest.mark.parametrize("header", [b"Bearer one", b"bearer one", b"BEARER  one ", b" Bearer one"])
def test_accepted(header: bytes) -> None:
    tenant = ApiKeys(["two", "one"]).tenant(header)
    assert tenant
    assert tenant == ApiKeys(["one"]).tenant(b"Bearer one")
    assert "one" not in tenant


@pytest.mark.parametrize(
    "header", [None, b"", b"one", b"Bearer", b"Bearer ", b"Basic one", b"Bearer on", b"Bearer ones", b"Bearer \xff"]
)
def test_refused(header: bytes | None) -> None:
    with pytest.raises(AuthenticationError):
        ApiKeys(["one", "two"]).tenant(header)


def test_keys_are_not_kept() -> None:
    assert "secret-key" not in repr(vars(ApiKeys(["secret-key"])))


@pytest.mark.parametrize("key", ["", " ", " a", "a\n", "ä", "a\0b"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigurationError):
        ApiKeys([key])
