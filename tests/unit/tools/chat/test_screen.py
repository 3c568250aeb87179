"""Answers as they are drawn: blocks are printed once, when nothing that follows can change them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tercet_tools.chat.answer import Answer
from tercet_tools.chat.client import Content, Finished, Reasoning, Usage
from tercet_tools.chat.screen import MarkdownAnswer, PlainAnswer, printable, split_blocks

TEXT = """# Title

One *paragraph*
of two lines.

- a list

  with a paragraph of its own
- its second item

```python
x = 1

y = 2
```

~~~~
```

not the end
~~~~
The end."""


def test_blocks_are_cut_where_nothing_can_change_them() -> None:
    blocks = split_blocks(TEXT)
    assert [block.partition("\n")[0] for block in blocks] == [
        "# Title", "One *paragraph*", "- a list", "```python", "~~~~",
    ]  # fmt: skip
    assert split_blocks("one\n\ntwo") == ["one\n\n", "two"]
    assert split_blocks("- one\n\n  still one") == ["- one\n\n  still one"]
    assert split_blocks("```\na\n\nb") == ["```\na\n\nb"]
    assert split_blocks("one\n\n```\na\n\nb") == ["one\n\n", "```\na\n\nb"]
    assert split_blocks("````\n```\n\nb\n````\n\nc") == ["````\n```\n\nb\n````\n\n", "c"]
    assert split_blocks("one\n") == ["one\n"]
    assert split_blocks("") == [""]


@settings(deadline=None)
@given(st.text(alphabet="a \n`~-#", max_size=60))
def test_nothing_is_lost_by_cutting(text: str) -> None:
    blocks = split_blocks(text)
    assert "".join(blocks) == text
    assert split_blocks(blocks[-1]) == [blocks[-1]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30))
def test_an_answer_looks_the_same_however_it_came(cuts: list[int]) -> None:
    def drawn(pieces: list[str]) -> str:
        out = io.StringIO()
        console = Console(file=out, width=60, height=20, force_terminal=False)
        with MarkdownAnswer(console, clock=lambda: 0.0) as view:
            for piece in pieces:
                view.content(piece)
        return out.getvalue()

    pieces, rest = [], TEXT
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert drawn([piece for piece in [*pieces, rest] if piece]) == drawn([TEXT])


def test_what_is_thought_comes_first_and_once() -> None:
    out = io.StringIO()
    with MarkdownAnswer(Console(file=out, width=60, force_terminal=False)) as view:
        view.reasoning("Let me ")
        view.reasoning("think.")
        view.content("**Yes.**")
    assert [line.strip() for line in out.getvalue().splitlines() if line.strip()][-2:] == ["Let me think.", "Yes."]


def test_a_block_higher_than_the_terminal_is_there_as_a_whole_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, height=10, force_terminal=True, color_system=None)
    with MarkdownAnswer(console, clock=iter(range(10_000)).__next__) as view:
        view.content("```\n")
        for number in range(50):
            view.content(f"line {number}\n")
            assert len(out.getvalue().splitlines()) < 10 * (number + 2)
    end = out.getvalue().rpartition("\x1b[2K")[2]
    assert all(f"line {number} " in end for number in range(50))


@pytest.mark.parametrize(("text", "expected"), [("Yes", "Yes\n"), ("Yes\n", "Yes\n"), ("", "")])
def test_a_pipe_gets_the_text_with_one_line_break_at_its_end(text: str, expected: str) -> None:
    out = io.StringIO()
    with PlainAnswer(out) as view:
        view.reasoning("Hm.")
        if text:
            view.content(text)
    assert out.getvalue() == expected


def test_control_characters_are_not_printed() -> None:
    assert printable("a\x1b[31mb\x9bc\rd\te\nf\x07\x7f\u2028") == "a[31mbcd\te\nf\u2028"


def test_figures() -> None:
    clock = iter([10.0, 10.5, 11.0, 12.5]).__next__
    answer = Answer(clock=clock)
    assert answer.figures() == ""
    answer.add(Reasoning("Hm"))
    assert answer.figures() == "about 1 token · first after 0.50 s"
    answer.add(Content("Yes"))
    answer.add(Finished("stop"))
    assert answer.figures() == "about 2 tokens · 0.5 per second · first after 0.50 s"
    answer.add(Usage(5))
    assert answer.figures() == "5 tokens · 2.0 per second · first after 0.50 s"
