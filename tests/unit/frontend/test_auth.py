"""API keys: what is sent, and where it is looked for."""

from __future__ import annotations

import pytest

from tercet_frontend.access.key_file import KeyRing
from tercet_frontend.access.keys import ANONYMOUS, ApiKey
from tercet_frontend.auth import ApiKeys
from tercet_shared.errors import AuthenticationError, ConfigurationError
from tests.unit.frontend.access.conftest import make_key


class _Elsewhere:
    def __init__(self, *keys: ApiKey) -> None:
        self.asked = 0
        self._ring = KeyRing(keys)

    async def find(self, digest: bytes) -> ApiKey | None:
        self.asked += 1
        return self._ring.find(digest)


async def test_without_keys_everybody_is_served() -> None:
    keys = ApiKeys()
    assert not keys.asked_for
    assert await keys.find(None) is ANONYMOUS
    assert await keys.find(b"Bearer anything") is ANONYMOUS


async def test_a_source_without_keys_serves_nobody() -> None:
    for keys in (ApiKeys(file=KeyRing()), ApiKeys(remote=_Elsewhere())):
        with pytest.raises(AuthenticationError, match="not valid"):
            await keys.find(b"Bearer anything")


@pytest.mark.parametrize("header", [b"Bearer one", b"bearer one", b"BEARER  one ", b" Bearer one"])
async def test_accepted(header: bytes) -> None:
    key = await ApiKeys(["two", "one"]).find(header)
    assert key.owner == (await ApiKeys(["one"]).find(b"Bearer one")).owner
    assert key.owner != (await ApiKeys(["two"]).find(b"Bearer two")).owner
    assert key.owner
    assert "one" not in key.owner
    assert not key.limited


@pytest.mark.parametrize(
    "header",
    [
        None, b"", b"one", b"Bearer", b"Bearer ", b"Basic one", b"Bearer on", b"Bearer ones", b"Bearer \xff",
        b"Bearer " + b"x" * 100_000,
    ],
)  # fmt: skip
async def test_refused(header: bytes | None) -> None:
    with pytest.raises(AuthenticationError):
        await ApiKeys(["one", "two"]).find(header)


async def test_the_header_of_anthropics_clients() -> None:
    keys = ApiKeys(["one", "two"])
    assert await keys.find(None, b"two") == await keys.find(b"Bearer two")
    # The other header counts where both are sent.
    assert await keys.find(b"Bearer one", b"two") == await keys.find(b"Bearer one")
    for authorization, key in ((None, b"three"), (None, b""), (b"", b"one"), (b"Bearer three", b"one")):
        with pytest.raises(AuthenticationError):
            await keys.find(authorization, key)


async def test_where_keys_are_looked_for() -> None:
    alice, bob = make_key("alice"), make_key("bob")
    elsewhere = _Elsewhere(bob)
    keys = ApiKeys(["plain"], file=KeyRing([alice]), remote=elsewhere)
    assert await keys.find(b"Bearer alice") is alice
    assert (await keys.find(b"Bearer plain")).owner
    assert elsewhere.asked == 0
    assert await keys.find(b"Bearer bob") is bob
    assert elsewhere.asked == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"disabled": True}, "is disabled"), ({"expires": "2020-01-01T00:00:00Z"}, "has expired")],
)
async def test_keys_that_do_not_count_any_more(fields: dict[str, object], message: str) -> None:
    keys = ApiKeys(file=KeyRing([make_key("alice", **fields)]))
    with pytest.raises(AuthenticationError, match=message):
        await keys.find(b"Bearer alice")


def test_keys_are_not_kept() -> None:
    keys = ApiKeys(["secret-key"])
    assert "secret-key" not in repr([vars(source) for source in keys._local])


@pytest.mark.parametrize("key", ["", " ", " a", "a\n", "ä", "a\0b"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigurationError):
        ApiKeys([key])
