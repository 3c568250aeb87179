"""`tercet chat` at a terminal, as a person uses it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import EOS, MODEL, running
from tests.fakes.core import STOP, FakeCore
from tests.fakes.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText
    from tests.fakes.core import FakeRequest

CTRL_C, CTRL_D, ENTER, ALT_ENTER = "\x03", "\x04", "\r", "\x1b\r"
CLEAR_LINE = "\x15"


def prompt_of(text: ModelText, request: FakeRequest) -> str:
    return str(text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))


def ids(text: ModelText, answer: str) -> list[int]:
    return list(text.tokenizer.encode(answer, add_special_tokens=False))


async def test_a_conversation(text: ModelText, terminal: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url) as person:
            await person.sees(f"{MODEL}. /help")
            await person.say("Hello" + ENTER)
            request = await core.next_request()
            request.send(*ids(text, "It is **bold**.\n\nAnd more"))
            await person.sees("And more")
            request.send(EOS, finish=STOP, stop_id=EOS)
            shown = await person.sees("first after ")
            assert "per second" in shown
            assert "**" not in person.shown
            assert "It is bold." in person.shown

            await person.say("Go on" + ENTER)
            request = await core.next_request()
            assert prompt_of(text, request).endswith(
                "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nIt is **bold**.\n\nAnd more<|im_end|>\n"
                "<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
            )
            request.send(*ids(text, "Yes."), EOS, finish=STOP, stop_id=EOS)
            await person.sees("first after ")
            await person.say(CTRL_D)
            assert await person.end() == 0


async def test_ctrl_c_stops_the_answer_and_not_the_program(text: ModelText, terminal: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url) as person:
            await person.sees("/help")
            await person.say("Hello" + ENTER)
            request = await core.next_request()
            request.send(*ids(text, "A long story"))
            await person.sees("A long story")
            person.type(CTRL_C)
            await core.wait_for(lambda: request.aborted)
            await person.sees("Stopped.")
            # What came is part of the conversation.
            await person.say("Go on" + ENTER)
            request = await core.next_request()
            assert "<|im_start|>assistant\nA long story<|im_end|>" in prompt_of(text, request)
            request.send(*ids(text, "Yes."), EOS, finish=STOP, stop_id=EOS)
            await person.sees("first after ")
            # Without an answer it only says how to leave.
            await person.say("half a thought" + CTRL_C)
            await person.sees("Ctrl-D or /quit leaves.")
            await person.say("/quit" + ENTER)
            assert await person.end() == 0


async def test_several_lines(text: ModelText, says: Any, terminal: Any) -> None:
    async with FakeCore(outputs=says("Yes.")) as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url) as person:
            await person.sees("/help")
            await person.say("one" + ALT_ENTER + "two\\" + ENTER + "three\nfour" + ENTER)
            await person.sees("first after ")
            await person.say("\x1b[200~pasted\nlines\x1b[201~" + ENTER)
            await person.sees("first after ")
            await person.say(CTRL_D)
            assert await person.end() == 0
    first, second = core.requests
    assert "<|im_start|>user\none\ntwo\nthree\nfour<|im_end|>" in prompt_of(text, first)
    assert "<|im_start|>user\npasted\nlines<|im_end|>" in prompt_of(text, second)


async def test_commands(text: ModelText, says: Any, terminal: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    async with FakeCore(outputs=says("Yes.")) as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url, "--system", "Be kind.", "--temperature", "0.5") as person:
            await person.sees("/help")
            await person.say("/help" + ENTER)
            await person.sees("/quit")
            await person.sees("Ctrl-D leaves.")
            await person.say("/nothing" + ENTER)
            await person.sees("There is no command /nothing")
            await person.say("/retry" + ENTER)
            await person.sees("There is no message yet")
            await person.say("/params" + ENTER)
            await person.sees("temperature=0.5")
            await person.say("/params temperature= max_tokens=9" + ENTER)
            await person.sees("\nmax_tokens=9")
            await person.say("/params heat=3" + ENTER)
            await person.sees("'heat=3' is not name=value")
            await person.say("/system Be brief." + ENTER)
            await person.sees("\nBe brief.")
            await person.say("/model" + ENTER)
            await person.sees(f"* {MODEL}")
            await person.say("/model other" + ENTER)
            await person.sees("does not serve 'other'")

            await person.say("Helo" + ENTER)
            await person.sees("first after ")
            await person.say("/edit" + ENTER)
            await person.sees("Helo")
            person.type(CLEAR_LINE + "Hello" + ENTER)
            await person.sees("first after ")
            await person.say("/retry" + ENTER)
            await person.sees("first after ")
            await person.say(f"/save {saved}" + ENTER)
            await person.sees("Saved as")
            await person.say("/clear" + ENTER)
            await person.sees("A new conversation.")
            await person.say("Anew" + ENTER)
            await person.sees("first after ")
            await person.say(f"/load {saved}" + ENTER)
            await person.sees("2 messages.")
            await person.say("Again" + ENTER)
            await person.sees("first after ")
            await person.say("/load" + ENTER)
            await person.sees("Name a file")
            await person.say("/quit" + ENTER)
            assert await person.end() == 0
    typo, edited, retried, anew, again = core.requests
    assert "user\nHelo<" in prompt_of(text, typo)
    assert "Helo<" not in prompt_of(text, edited)
    assert prompt_of(text, edited).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<")
    assert prompt_of(text, retried) == prompt_of(text, edited)
    assert edited.submit.sampling.max_tokens == 9
    assert edited.submit.sampling.temperature == 1.0
    assert "Hello" not in prompt_of(text, anew)
    assert "Be brief." in prompt_of(text, anew)
    assert "user\nHello<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n" in prompt_of(text, again)
    (conversation,) = json.loads(saved.read_text())["conversations"]
    assert conversation["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes."},
    ]


async def test_an_error_leaves_the_message_for_another_attempt(text: ModelText, terminal: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url) as person:
            await person.sees("/help")
            await person.say("Hello" + ENTER)
            request = await core.next_request()
            request.reject(pb.ERROR_KIND_OVERLOADED, "The queue is full.")
            await person.sees("The queue is full. /retry asks again.")
            await person.say("/retry" + ENTER)
            request = await core.next_request()
            assert prompt_of(text, request).count("Hello") == 1
            request.send(*ids(text, "Hi!"), EOS, finish=STOP, stop_id=EOS)
            await person.sees("Hi!")
            await person.sees("first after ")
            await person.say(CTRL_D)
            assert await person.end() == 0


async def test_the_model_does_not_command_the_terminal(text: ModelText, terminal: Any) -> None:
    evil = "Look: \x1b]0;owned\x07 and \x1b[2J and \x9b31m done"
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url) as person:
            await person.sees("/help")
            await person.say("Hello" + ENTER)
            request = await core.next_request()
            request.send(*ids(text, evil), EOS, finish=STOP, stop_id=EOS)
            await person.sees("first after ")
            await person.say(CTRL_D)
            assert await person.end() == 0
    assert "done" in person.shown
    assert "\x1b]0;owned" not in person.raw
    assert "\x1b[2J and" not in person.raw
    assert "\x9b31m" not in person.raw


async def test_the_history_outlives_the_program_and_is_private(
    text: ModelText, says: Any, terminal: Any, tmp_path: Path
) -> None:
    async with FakeCore(outputs=says("Yes.")) as core, running(text, [core]) as front_end:
        async with terminal("--url", front_end.url) as person:
            await person.sees("/help")
            await person.say("Remember me" + ENTER)
            await person.sees("first after ")
            await person.say(CTRL_D)
            assert await person.end() == 0
        async with terminal("--url", front_end.url) as person:
            await person.sees("/help")
            await person.say("\x1b[A")
            await person.sees("Remember me")
            person.type(ENTER)
            await person.sees("first after ")
            await person.say(CTRL_D)
            assert await person.end() == 0
    assert [prompt_of(text, request).count("Remember me") for request in core.requests] == [1, 1]
    history = tmp_path / "state" / "tercet" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600


async def test_no_server(terminal: Any) -> None:
    async with terminal("--url", f"http://127.0.0.1:{free_port()}") as person:
        await person.sees("error: Nothing answers at")
        assert await person.end() == 1
