from __future__ import annotations

import asyncio
import os

from hypothesis import given
from hypothesis import strategies as st

from tercet_shared.lifecycle.pipes import LineReader


async def test_lines_come_as_they_are_written_and_an_unfinished_one_at_the_end() -> None:
    read, write = os.pipe()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    reader = LineReader(read, lines.put_nowait)
    reader.open()
    os.write(write, b"one\ntw")
    assert await asyncio.wait_for(lines.get(), 60) == b"one"
    os.write(write, b"o\nthree")
    assert await asyncio.wait_for(lines.get(), 60) == b"two"
    os.close(write)
    assert await asyncio.wait_for(lines.get(), 60) == b"three"
    reader.close()  # the end closed it already


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=8), st.integers(1, 16))
def test_a_line_over_the_limit_comes_in_pieces_and_nothing_is_lost(lines: list[bytes], limit: int) -> None:
    read, write = os.pipe()
    taken: list[bytes] = []
    reader = LineReader(read, taken.append, max_line=limit)
    for line in lines:
        os.write(write, line + b"\n")
        reader.drain()
    os.close(write)
    reader.drain()
    assert b"".join(taken) == b"".join(lines)
    assert len(taken) >= len(lines)
