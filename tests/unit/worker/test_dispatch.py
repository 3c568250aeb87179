"""Which steps become graphs, and of which size: known answers and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet_shared.errors import ConfigurationError
from tercet_worker.graphs.dispatch import Choice, Dispatcher, Mode, StepShape, capture_sizes

USUAL = Dispatcher.up_to(max_rows=1024, max_tokens=8192)


@pytest.mark.parametrize(
    ("shape", "choice"),
    [
        (StepShape(tokens=300, rows=3, longest=298), Choice(Mode.PIECEWISE, 304)),
        (StepShape(tokens=2, rows=2, longest=1), Choice(Mode.FULL, 2)),
        (StepShape(tokens=8192, rows=2, longest=8191), Choice(Mode.EAGER, 8192)),
        (StepShape(tokens=1, rows=1, longest=1), Choice(Mode.FULL, 1)),
        (StepShape(tokens=3, rows=3, longest=1), Choice(Mode.FULL, 4)),
        (StepShape(tokens=3, rows=1, longest=3), Choice(Mode.PIECEWISE, 4)),
        (StepShape(tokens=512, rows=512, longest=1), Choice(Mode.FULL, 512)),
        (StepShape(tokens=513, rows=513, longest=1), Choice(Mode.EAGER, 513)),
        # Rows that share a prefix are attended to in two parts, which differ from step to step.
        (StepShape(tokens=64, rows=64, longest=1, cascade=True), Choice(Mode.PIECEWISE, 64)),
    ],
)
def test_known_answers(shape: StepShape, choice: Choice) -> None:
    assert USUAL.choose(shape) == choice


def test_more_rows_than_slots_have_no_full_graph() -> None:
    dispatcher = Dispatcher.up_to(max_rows=100, max_tokens=8192)
    assert dispatcher.full[-1] == 100
    assert dispatcher.piecewise[-1] == 512
    assert dispatcher.choose(StepShape(99, 99, 1)) == Choice(Mode.FULL, 100)


def test_without_graphs_every_step_is_eager_and_has_no_padding() -> None:
    assert Dispatcher.eager().choose(StepShape(3, 3, 1)) == Choice(Mode.EAGER, 3)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1), (0, 1), (-1,)])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        Dispatcher(sizes, ())


@given(largest=st.integers(0, 2000))
def test_sizes_ascend_and_end_with_the_largest(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[-1] if sizes else 0) == largest
    assert len(sizes) <= 80


@given(
    max_rows=st.integers(1, 700),
    max_tokens=st.integers(1, 9000),
    tokens=st.integers(1, 9000),
    longest=st.integers(1, 9000),
    cascade=st.booleans(),
)
def test_padding_is_never_smaller_and_as_small_as_it_can_be(
    max_rows: int, max_tokens: int, tokens: int, longest: int, cascade: bool
) -> None:
    dispatcher = Dispatcher.up_to(max_rows=max_rows, max_tokens=max_tokens)
    longest = min(longest, tokens)
    shape = StepShape(tokens, rows=tokens - longest + 1, longest=longest, cascade=cascade)
    choice = dispatcher.choose(shape)
    table = {Mode.FULL: dispatcher.full, Mode.PIECEWISE: dispatcher.piecewise, Mode.EAGER: (tokens,)}[choice.mode]
    assert choice.tokens in table
    assert choice.tokens >= tokens
    assert not [size for size in table if tokens <= size < choice.tokens]
    if choice.mode is Mode.FULL:
        assert shape.uniform
        assert not cascade
    if choice.mode is Mode.EAGER:
        assert not dispatcher.piecewise or dispatcher.piecewise[-1] < tokens
    # One token more is never run with less padding behind it.
    more = dispatcher.choose(StepShape(tokens + 1, shape.rows + 1, longest, cascade))
    assert more.tokens >= choice.tokens
