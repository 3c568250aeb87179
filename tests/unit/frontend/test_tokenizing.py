"""Prompt ids: the same inline and in a thread, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from tercet_frontend.cores.interface import ServedModel
from tercet_frontend.rendering import Conversation
from tercet_frontend.tokenizing import ModelText, PromptEncoder
from tercet_shared.checkpoint import ChatTemplate, GenerationDefaults, SpecialTokens
from tercet_shared.checkpoint.template import RenderLimits
from tercet_shared.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable

MODEL = ServedModel("m", max_model_len=1000, vocab_size=300)


class _Tokenizer:
    """A token per character."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.release = threading.Event()
        self.release.set()

    special = SpecialTokens()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        assert self.release.wait(60)
        return ([1] if add_special_tokens else []) + [ord(character) for character in text]


def _text(tokenizer: _Tokenizer, template: str | None = None) -> ModelText:
    compiled = None if template is None else ChatTemplate({"default": template}, {}, "a test")
    return ModelText(cast("Any", tokenizer), cast("Any", None), compiled, GenerationDefaults(), ())


async def test_short_inline_and_long_in_a_thread() -> None:
    tokenizer = _Tokenizer()
    with PromptEncoder(inline_characters=10) as encoder:
        for prompt in ("a" * 10, "a" * 11):
            (ids,) = await encoder.prompts(_text(tokenizer), MODEL, (prompt,))
            assert ids.tolist() == [1, *[97] * len(prompt)]
            assert ids.dtype == "int32"
        await encoder.prompts(_text(tokenizer), MODEL, ("a" * 6, "b" * 6))
    inline = [thread is threading.main_thread() for thread in tokenizer.threads]
    assert inline == [True, False, False, False]


async def test_the_loop_goes_on_meanwhile() -> None:
    tokenizer = _Tokenizer()
    tokenizer.release.clear()
    with PromptEncoder(inline_characters=10) as encoder:
        call = asyncio.create_task(encoder.prompts(_text(tokenizer), MODEL, ("a" * 100,)))
        await asyncio.sleep(0)  # it runs, and cannot end before the next line does
        tokenizer.release.set()
        assert len((await call)[0]) == 101


def _conversation(*contents: str, **more: Any) -> Conversation:
    messages = [{"role": "user", "content": content} for content in contents]
    return Conversation(messages=messages, size=sum(map(len, contents)), **more)


async def test_chat() -> None:
    tokenizer = _Tokenizer()
    template = "{% for m in messages %}{{ m.content }};{% endfor %}{{ '>' if add_generation_prompt }}{{ name }}"
    with PromptEncoder() as encoder:
        prompt = await encoder.chat(_text(tokenizer, template), MODEL, _conversation("A", "B", variables={"name": "C"}))
        assert "".join(map(chr, prompt.ids)) == "A;B;>C"  # the template writes special tokens itself
        assert prompt.end == "A;B;>C"
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await encoder.chat(_text(tokenizer, ""), MODEL, _conversation("A"))
        with pytest.raises(InvalidRequestError, match="no chat template"):
            await encoder.chat(_text(tokenizer), MODEL, _conversation("A"))


async def test_templates_with_much_work_run_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the two limits the one of time would also stop little work on a machine that stands still for a moment.
    monkeypatch.setattr("tercet_frontend.tokenizing._INLINE_LIMITS", RenderLimits(steps=20_000, seconds=3_600.0))
    tokenizer = _Tokenizer()
    slow = "{% for i in range(999) %}{% for j in range(99) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    with PromptEncoder() as encoder:
        for template in ("{{ messages[0].content }}", slow):
            prompt = await encoder.chat(_text(tokenizer, template), MODEL, _conversation("A"))
            assert prompt.ids.tolist() == [65]
        own = _conversation("A", template="{{ messages[0].content }}")
        assert (await encoder.chat(_text(tokenizer, "x"), MODEL, own)).ids.tolist() == [65]
    assert [thread is threading.main_thread() for thread in tokenizer.threads] == [True, False, False]


async def test_a_template_of_the_request_that_is_not_valid() -> None:
    with PromptEncoder() as encoder:
        with pytest.raises(InvalidRequestError, match="not valid") as caught:
            await encoder.chat(_text(_Tokenizer(), "x"), MODEL, _conversation("A", template="{% for %}"))
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize("inline", [0, 10**6])
async def test_limits(inline: int) -> None:
    with PromptEncoder(inline_characters=inline) as encoder:
        text = _text(_Tokenizer())
        assert len((await encoder.prompts(text, MODEL, ([5] * 999,)))[0]) == 999
        with pytest.raises(ContextLengthError) as caught:
            await encoder.prompts(text, MODEL, ([5], [5] * 1000))
        assert caught.value.param == "prompt[1]"
        for ids in ([-1], [300], [2**40]):
            with pytest.raises(InvalidRequestError, match="vocabulary"):
                await encoder.prompts(text, MODEL, (ids,))


class _Sparse:
    """A token for every ``width`` characters; notes how much text it was given."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.seen: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.seen.append(len(text))
        return [5] * -(-len(text) // self.width)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_far_too_long_is_not_tokenized_to_its_end(chat: bool) -> None:
    tokenizer = _Sparse(1)
    text = _text(cast("Any", tokenizer), "{{ messages[0].content }}")
    prompt = "7" * 1_000_000
    with PromptEncoder() as encoder:
        call: Awaitable[Any] = (
            encoder.chat(text, MODEL, _conversation(prompt)) if chat else encoder.prompts(text, MODEL, (prompt,))
        )
        with pytest.raises(ContextLengthError) as caught:
            await call
    assert caught.value.param == ("messages" if chat else "prompt")
    assert sum(tokenizer.seen) < 50_000


async def test_a_long_text_of_few_tokens_is_served() -> None:
    tokenizer = _Sparse(200)
    with PromptEncoder() as encoder:
        (ids,) = await encoder.prompts(_text(cast("Any", tokenizer)), MODEL, ("7" * 199_800,))
        assert len(ids) == 999
        with pytest.raises(ContextLengthError, match="alone has 1000"):
            await encoder.prompts(_text(cast("Any", tokenizer)), MODEL, ("7" * 200_000,))
