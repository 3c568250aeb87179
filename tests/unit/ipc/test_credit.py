"""Streams with credit: nothing is lost or reordered, and no more than a window is under way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.errors import ProtocolError
from tercet_shared.ipc.credit import MAX_PART, CreditReceiver, CreditSender, Part, StreamLimits
from tercet_shared.ipc.errors import FrameTooLargeError, LinkClosedError
from tercet_shared.ipc.layout import record_size


class Way:
    """Both ends, and what is between them, which moves when it is told."""

    def __init__(self, window: int = 4096, max_frame: int = 1 << 20) -> None:
        limits = StreamLimits(window, max_frame)
        self.parts: list[Part] = []
        self.announced: list[int] = []
        self.frames: list[bytes] = []
        self.sender = CreditSender(limits, self.parts.append)
        self.receiver = CreditReceiver(limits, self.announced.append)

    def carry(self, count: int | None = None) -> None:
        moved, self.parts[:] = self.parts[:count], self.parts[len(self.parts[:count]) :]
        self.receiver.take(moved)

    def give_back(self) -> None:
        announced, self.announced[:] = self.announced[:], []
        for amount in announced:
            self.sender.consumed(amount)

    def finish(self) -> None:
        while self.parts or self.announced:
            self.carry()
            self.give_back()


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([4096, 5000, 64 * 1024]))
def test_every_frame_arrives_once_and_in_order(seed: int, window: int) -> None:
    draw = random.Random(seed)
    way = Way(window)
    frames: list[bytes] = []
    started = False
    for _ in range(draw.randint(1, 120)):
        action = draw.random()
        if action < 0.5:
            frames.append(
                draw.randbytes(draw.choice([0, 1, 15, 16, 500, window // 4 - 16, window // 4, window, 20_000]))
            )
            way.sender.send(frames[-1])
        elif action < 0.7:
            way.carry(draw.randint(1, 3))
        elif action < 0.9:
            way.give_back()
        elif not started:
            started = True
            way.receiver.start(way.frames.extend)
        assert sum(record_size(len(part.data)) for part in way.parts) <= window
    if not started:
        assert way.frames == []
        way.receiver.start(way.frames.extend)
    way.finish()
    assert way.frames == frames
    assert way.sender.pending == 0


def test_parts_stay_small_whatever_the_window() -> None:
    way = Way(window=64 << 20, max_frame=64 << 20)
    way.sender.send(bytes(3_000_000))
    assert max(len(part.data) for part in way.parts) == MAX_PART
    assert len(way.parts) == -(-3_000_000 // MAX_PART)


def test_a_frame_over_the_limit_is_not_sent_and_the_next_one_is() -> None:
    way = Way(max_frame=100)
    with pytest.raises(FrameTooLargeError, match="a frame of 101 bytes is over the link's limit of 100"):
        way.sender.send(bytes(101))
    way.sender.send(bytes(100))
    way.receiver.start(way.frames.extend)
    way.finish()
    assert way.frames == [bytes(100)]


def test_a_buffer_may_be_used_again() -> None:
    way = Way()
    buffer = bytearray(b"first")
    way.sender.send(buffer)
    buffer[:] = b"other"
    way.receiver.start(way.frames.extend)
    way.finish()
    assert way.frames == [b"first"]


def test_what_waits_can_be_dropped() -> None:
    way = Way()
    for _ in range(10):
        way.sender.send(bytes(1000))
    assert way.sender.pending > 5
    way.sender.drop()
    assert way.sender.pending == 0


@pytest.mark.parametrize("started", [True, False])
def test_a_sender_that_ignores_the_window_is_found_out(started: bool) -> None:
    way = Way()
    if started:
        way.receiver.start(way.frames.extend)
        way.receiver.take([Part(bytes(900), 0)])  # consumed, but too little to be told
    with pytest.raises(ProtocolError, match="under way"):
        way.receiver.take([Part(bytes(1000), 0)] * 5)


def test_a_receiver_that_gives_back_too_much_is_found_out() -> None:
    way = Way()
    way.sender.send(bytes(100))
    with pytest.raises(ProtocolError, match="claims to have consumed 200 bytes"):
        way.sender.consumed(200)


@pytest.mark.parametrize(
    "parts",
    [
        [Part(b"ab", 2), Part(b"cd", 1)],
        [Part(b"ab", 2), Part(b"c", 2)],
        [Part(b"ab", 2), Part(b"", 2)],
        [Part(b"ab", 2), Part(b"abc", 0)],
        [Part(b"", 2)],
        [Part(b"ab", 1 << 40)],
        [Part(bytes(101), 0)],
        [Part(b"ab", 99)],
    ],
)
def test_parts_that_do_not_fit_together_are_found_out(parts: list[Part]) -> None:
    way = Way(max_frame=100)
    way.receiver.start(way.frames.extend)
    with pytest.raises(ProtocolError, match="frame"):
        way.receiver.take(parts)
    assert way.frames == []


def test_a_closed_receiver_takes_nothing() -> None:
    way = Way()
    way.receiver.take([Part(b"kept", 0)])
    way.receiver.close()
    way.receiver.take([Part(bytes(1000), 0)] * 50)
    with pytest.raises(LinkClosedError):
        way.receiver.start(way.frames.extend)
    assert way.frames == []
