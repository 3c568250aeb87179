from __future__ import annotations

import io
import threading

import pytest

from tercet_shared.lifecycle.terminal import Terminal
from tercet_shared.lifecycle.views import PlainView, RichView, View, choose_view


def show(terminal: Terminal) -> None:
    terminal.start()
    terminal.progress("worker", "loading weights", 0.1)
    terminal.progress("worker", "loading weights", 0.2)
    terminal.progress("worker", "loading weights", 0.5)
    terminal.progress("core", "waiting for the worker", None)
    terminal.log("core", "[bold] is not markup")
    terminal.ready("worker")
    terminal.announce("listens")
    terminal.say("bye")


def test_plain_lines_name_the_service_and_do_not_repeat_themselves() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, err, choose_view(err))
    show(terminal)
    assert terminal.close(60)
    assert out.getvalue() == "listens\n"
    assert err.getvalue().splitlines() == [
        "worker    | loading weights: 10%",
        "worker    | loading weights: 50%",
        "core      | waiting for the worker",
        "core      | [bold] is not markup",
        "worker    | ready",
        "bye",
    ]


def test_at_a_terminal_there_are_bars_and_the_same_words() -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    out, err = io.StringIO(), Tty()
    view = choose_view(err)
    assert isinstance(view, RichView)
    terminal = Terminal(out, err, view)
    show(terminal)
    assert terminal.close(60)
    for words in ("loading weights", "waiting for the worker", "[bold] is not markup", "ready", "bye"):
        assert words in err.getvalue()


def test_a_closed_stream_is_silence() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, err, PlainView(err))
    out.close()
    err.close()
    show(terminal)
    assert terminal.close(60)


def test_a_stuck_view_drops_lines_counts_them_and_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet_shared.lifecycle.terminal._QUEUE", 3)
    entered, go, told = threading.Event(), threading.Event(), threading.Event()

    class Stuck(PlainView):
        def line(self, text: str, name: str | None = None) -> None:
            entered.set()
            go.wait()
            super().line(text, name)
            if "could not be shown" in text:
                told.set()

    err = io.StringIO()
    view: View = Stuck(err)
    terminal = Terminal(io.StringIO(), err, view)
    terminal.start()
    terminal.say("0")
    assert entered.wait(60)
    for number in range(1, 10):
        terminal.say(str(number))
    assert not terminal.close(0.01)
    go.set()
    assert told.wait(60)
    assert terminal.close(60)
    assert err.getvalue().splitlines() == ["0", "1", "2", "3", "(7 lines could not be shown in time)"]
