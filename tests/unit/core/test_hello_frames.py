"""Hellos survive the wire exactly, and a group that cannot be is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.layout import MAX_READERS
from tercet_shared.wire.frames import decode_hello, encode_hello
from tests.fakes.worker import hello

GROUP: dict[str, Any] = {"group": "a group", "ranks": 4, "rank": 3, "stages": 2, "answers": False}


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_a_hello_comes_back_as_it_was(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, MAX_READERS))
    offer = hello(
        ranks=ranks,
        rank=data.draw(st.integers(0, ranks - 1)),
        stages=data.draw(st.sampled_from([n for n in range(1, ranks + 1) if not ranks % n])),
        group=data.draw(st.text(min_size=1, max_size=128)) if ranks > 1 else "",
        answers=data.draw(st.booleans()) if ranks > 1 else True,
        pid=data.draw(st.integers(0, 2**31)),
    )
    assert decode_hello(encode_hello(offer)) == offer


def test_a_single_worker_is_a_group_of_one() -> None:
    offer = decode_hello(encode_hello(hello()))
    assert (offer.group, offer.rank, offer.ranks, offer.stages, offer.answers) == ("", 0, 1, 1, True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rank": -1}, "rank -1 of 4"),
        ({"rank": 4}, "rank 4 of 4"),
        ({"ranks": 0, "rank": 0}, "rank 0 of 0"),
        ({"ranks": MAX_READERS + 1}, f"1 to {MAX_READERS} ranks"),
        ({"stages": 3}, "4 ranks, which cannot be split evenly into 3 stages"),
        ({"stages": 0}, "into 0 stages"),
        ({"stages": -1}, "into -1 stages"),
        ({"group": ""}, "with 4 ranks names the group ''"),
        ({"group": "g" * 129}, "names the group 'ggg"),
        ({"ranks": 1, "rank": 0, "stages": 1}, "with 1 ranks names the group 'a group'"),
        ({"ranks": 1, "rank": 0, "stages": 1, "group": ""}, "does not answer"),
        ({"ranks": True}, "field ranks is missing or of a wrong type"),
        ({"answers": 1}, "field answers is missing or of a wrong type"),
        ({"group": None}, "field group is missing or of a wrong type"),
    ],
)
def test_a_group_that_cannot_be_is_refused(changes: dict[str, Any], complaint: str) -> None:
    decode_hello(encode_hello(hello(**GROUP)))
    with pytest.raises(ProtocolError, match=complaint):
        decode_hello(encode_hello(hello(**(GROUP | changes))))


def test_a_hello_without_a_field_is_refused() -> None:
    kind, fields = msgpack.unpackb(encode_hello(hello()))
    del fields["ranks"]
    with pytest.raises(ProtocolError, match="field ranks is missing"):
        decode_hello(msgpack.packb([kind, fields]))
