"""The chat page in a real browser, before a real front end."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tercet_frontend.tokenizing import ModelText
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.checkpoint import Checkpoint
from tercet_tools.chat.conversation import Conversation, Message, load
from tests.contract.frontend.conftest import EOS, MODEL, late_headers, running  # noqa: F401  # a fixture
from tests.e2e.browser import Visit, browser, needs_chromium, playwright_api
from tests.e2e.conftest import Serving
from tests.fakes.core import LENGTH, STOP, FakeCore, FakeRequest
from tests.fakes.models import one_model

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def text(smollm2: Path) -> ModelText:
    return ModelText.read(Checkpoint.open(str(smollm2)))


@pytest.fixture
async def visit() -> AsyncIterator[Visit]:
    async with browser() as visit:
        yield visit


def ids(text: ModelText, answer: str) -> list[int]:
    return list(text.tokenizer.encode(answer, add_special_tokens=False))


def always(text: ModelText, answer: str) -> Callable[[FakeRequest], list[int]]:
    return lambda _request: [*ids(text, answer), EOS]


def prompt_of(text: ModelText, request: FakeRequest) -> str:
    return str(text.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))


async def ready(page: Any) -> None:
    await page.locator("#model.single").wait_for()


async def say(page: Any, message: str) -> None:
    await page.fill("#prompt", message)
    await page.press("#prompt", "Enter")


async def answered(page: Any, count: int = 1) -> None:
    """Waits for the whole of the ``count``-th answer."""
    await page.locator(".assistant").nth(count - 1).wait_for()
    await playwright_api.expect(page.locator(".message.busy")).to_have_count(0)
    await playwright_api.expect(page.locator(".assistant")).to_have_count(count)


async def texts(page: Any) -> list[str]:
    return [found.strip() for found in await page.locator(".message .text").all_inner_texts()]


# ---------------------------------------------------------------------------------------------------- talking


async def test_a_streamed_answer_and_the_next_one(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await playwright_api.expect(page.locator("#prompt")).to_be_focused()
        await page.keyboard.type("Hello")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("there")
        await page.keyboard.press("Enter")
        request = await core.next_request()
        request.send(*ids(text, "The first **half**"))
        await playwright_api.expect(page.locator(".message.busy strong")).to_have_text("half")
        await playwright_api.expect(page.locator("#stop")).to_be_visible()
        await playwright_api.expect(page.locator("#send")).to_be_hidden()
        request.send(*ids(text, " and the second"), EOS, finish=STOP, stop_id=EOS)
        await answered(page)
        assert await texts(page) == ["Hello\nthere", "The first half and the second"]
        count = len(ids(text, "The first **half** and the second"))
        stats = await page.locator(".stats").inner_text()
        assert re.fullmatch(rf"{count + 1} tokens · [\d.]+ per second · first after [\d.]+ s", stats)
        assert await page.title() == "Hello · Tercet"

        await say(page, "And now?")
        request = await core.next_request()
        assert prompt_of(text, request).endswith(
            "user\nHello\nthere<|im_end|>\n<|im_start|>assistant\nThe first **half** and the second<|im_end|>\n"
            "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        )
        request.send(*ids(text, "Cut"), finish=LENGTH)
        await answered(page, 2)
        await playwright_api.expect(page.locator(".limit").last).to_contain_text("limit of tokens")


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stopping_reaches_the_server(text: ModelText, visit: Visit, by: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await say(page, "Hello")
        request = await core.next_request()
        request.send(*ids(text, "A long story"))
        await playwright_api.expect(page.locator(".md")).to_have_text("A long story")
        if by == "key":
            await page.keyboard.press("Escape")
        else:
            await page.click("#stop")
        await core.wait_for(lambda: request.aborted)
        await answered(page)
        await playwright_api.expect(page.locator(".limit")).to_have_text("Stopped.")
        await playwright_api.expect(page.locator("#prompt")).to_be_focused()
        assert await texts(page) == ["Hello", "A long story"]


async def test_edit_regenerate_and_undo(text: ModelText, visit: Visit) -> None:
    def outputs(request: FakeRequest) -> list[int]:
        return [*ids(text, f"Answer {core.requests.index(request) + 1}"), EOS]

    async with FakeCore(outputs=outputs) as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await say(page, "One")
        await answered(page)
        await say(page, "Two")
        await answered(page, 2)
        await page.locator(".assistant").last.get_by_label("Answer again").click()
        await playwright_api.expect(page.locator(".md").last).to_have_text("Answer 3")
        assert await texts(page) == ["One", "Answer 1", "Two", "Answer 3"]

        await page.locator(".user").first.get_by_label("Edit and send again").click()
        editor = page.get_by_label("Edit your message")
        await playwright_api.expect(editor).to_be_focused()
        await page.keyboard.press("Escape")
        await playwright_api.expect(editor).to_have_count(0)
        await page.locator(".user").first.get_by_label("Edit and send again").click()
        await editor.fill("Uno")
        await editor.press("Enter")
        await answered(page)
        assert await texts(page) == ["Uno", "Answer 4"]
        assert "One" not in prompt_of(text, core.requests[3])

        await page.get_by_role("button", name="Undo").click()
        assert await texts(page) == ["One", "Answer 1", "Two", "Answer 3"]
        await page.reload()
        await ready(page)
        assert await texts(page) == ["One", "Answer 1", "Two", "Answer 3"]


async def test_an_answer_goes_on_while_another_conversation_is_open(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await say(page, "One")
        request = await core.next_request()
        request.send(*ids(text, "First"))
        await playwright_api.expect(page.locator(".md")).to_have_text("First")
        await page.click("#new-chat")
        await playwright_api.expect(page.locator("#empty")).to_be_visible()
        await playwright_api.expect(page.locator(".entry.running")).to_have_count(1)
        request.send(*ids(text, " answer"), EOS, finish=STOP, stop_id=EOS)
        await playwright_api.expect(page.locator(".entry.running")).to_have_count(0)
        await page.go_back()
        await playwright_api.expect(page.locator(".md")).to_have_text("First answer")


# ---------------------------------------------------------------------------------------------------- what is kept


async def test_reload_keeps_conversations_also_in_the_middle_of_an_answer(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await say(page, "Tell me a story")
        request = await core.next_request()
        request.send(*ids(text, "Once upon a time"))
        await playwright_api.expect(page.locator(".md")).to_have_text("Once upon a time")
        await page.reload()
        await core.wait_for(lambda: request.aborted)
        await ready(page)
        assert await texts(page) == ["Tell me a story", "Once upon a time"]
        await playwright_api.expect(page.locator(".limit")).to_have_text("Stopped.")
        await playwright_api.expect(page.locator(".entry.current .name")).to_have_text("Tell me a story")


async def test_rename_delete_undo(text: ModelText, visit: Visit) -> None:
    async with FakeCore(outputs=always(text, "Yes")) as core, running(text, [core]) as front_end:
        async with visit(front_end.url) as page:
            await ready(page)
            for message in ("First", "Second"):
                await page.click("#new-chat")
                await say(page, message)
                await answered(page)
            names = page.locator(".entry .name")
            await playwright_api.expect(names).to_have_text(["Second", "First"])
            await page.locator(".entry").last.hover()
            await page.locator(".entry").last.get_by_label("Rename").click()
            await page.get_by_label("Name of the conversation").fill("<b>Mine</b>")
            await page.keyboard.press("Enter")
            await playwright_api.expect(names).to_have_text(["Second", "<b>Mine</b>"])
            await page.locator(".entry").first.hover()
            await page.locator(".entry").first.get_by_label("Delete").click()
            await playwright_api.expect(names).to_have_text(["<b>Mine</b>"])
            await playwright_api.expect(page.locator("#empty")).to_be_visible()
            await page.get_by_role("button", name="Undo").click()
            await playwright_api.expect(names).to_have_text(["Second", "<b>Mine</b>"])
            assert await texts(page) == ["Second", "Yes"]
            await page.locator(".entry").first.hover()
            await page.locator(".entry").first.get_by_label("Delete").click()
            await page.reload()
            await playwright_api.expect(names).to_have_text(["<b>Mine</b>"])


async def test_export_import_and_the_terminal_s_files(text: ModelText, visit: Visit, tmp_path: Path) -> None:
    async with FakeCore(outputs=always(text, "Yes")) as core, running(text, [core]) as front_end:
        async with visit(front_end.url) as page:
            await ready(page)
            await page.click("#export")
            await playwright_api.expect(page.locator("#toast")).to_contain_text("no conversation yet")
            await say(page, "Exported")
            await answered(page)
            async with page.expect_download() as download:
                await page.click("#export")
            exported = tmp_path / "exported.json"
            await (await download.value).save_as(exported)
        assert [message.content for message in load(exported).messages] == ["Exported", "Yes"]

        saved = tmp_path / "saved.json"
        messages = [Message("user", "From the terminal"), Message("assistant", "*Hi*", "Hm.")]
        Conversation(MODEL, "Be kind.", {"temperature": 0.5, "stop": ["END"]}, messages).save(saved)
        async with visit(front_end.url) as page:
            for file in (exported, saved):
                await page.set_input_files("#import-file", file)
                await playwright_api.expect(page.locator("#toast")).to_contain_text("1 conversation was added")
            await page.set_input_files("#import-file", exported)
            await playwright_api.expect(page.locator("#toast")).to_contain_text("were here already")
            await page.get_by_role("button", name="From the terminal").click()
            assert await texts(page) == ["From the terminal", "Hi"]
            assert await page.locator("#p-system").input_value() == "Be kind."
            assert await page.locator("#p-temperature").input_value() == "0.5"

            document = json.loads(saved.read_text())
            document["conversations"][0]["messages"][0]["content"] = 3
            for content, sentence in (
                ("no JSON", "not JSON"), ("{}", "does not hold conversations"),
                (json.dumps(document), "Conversation 1 of this file is damaged"),
            ):  # fmt: skip
                bad = tmp_path / "bad.json"
                bad.write_text(content)
                await page.set_input_files("#import-file", bad)
                await playwright_api.expect(page.locator("#toast")).to_contain_text(sentence)
            await playwright_api.expect(page.locator(".entry")).to_have_count(2)


async def test_parameters(text: ModelText, visit: Visit) -> None:
    async with FakeCore(outputs=always(text, "One, two, three")) as core, running(text, [core]) as front_end:
        async with visit(front_end.url) as page:
            await ready(page)
            await page.click("#open-settings")
            await playwright_api.expect(page.locator("#p-system")).to_be_focused()
            for field, value in (
                ("system", "Be brief."), ("temperature", "0.5"), ("top_p", "0.25"), ("max_tokens", "50"), ("seed", "7"),
                ("stop", ", th\nnever"),
            ):  # fmt: skip
                await page.fill(f"#p-{field}", value)
            await page.fill("#p-temperature", "3")
            await playwright_api.expect(page.locator("#p-temperature-help")).to_have_text("At most 2.")
            await playwright_api.expect(page.locator("#p-temperature")).to_have_attribute("aria-invalid", "true")
            await page.reload()
            await ready(page)
            await say(page, "Count")
            await answered(page)
            assert await texts(page) == ["Count", "One, two"]
            await page.click("#open-settings")
            await page.click("#reset")
            await say(page, "Again")
            await answered(page, 2)
    first, second = core.requests
    sampling = first.submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 50)
    assert "system\nBe brief.<" in prompt_of(text, first)
    assert (second.submit.sampling.temperature, second.submit.sampling.top_p) == (1.0, 1.0)
    assert "Be brief." not in prompt_of(text, second)


# ---------------------------------------------------------------------------------------------------- when it fails


async def test_the_key_is_asked_for(text: ModelText, visit: Visit) -> None:
    async with FakeCore(outputs=always(text, "Yes")) as core, running(text, [core], keys=["secret"]) as front_end:
        async with visit(front_end.url, expect="401") as page:
            await playwright_api.expect(page.locator("#notice")).to_contain_text("asks for an API key")
            await page.get_by_role("button", name="Enter a key").click()
            await playwright_api.expect(page.locator("#key")).to_be_focused()
            await page.keyboard.type("wrong")
            await page.keyboard.press("Enter")
            await playwright_api.expect(page.locator("#notice")).to_contain_text("does not accept")
            await page.click("#set-key")
            await page.fill("#key", "secret")
            await page.keyboard.press("Enter")
            await ready(page)
            await playwright_api.expect(page.locator("#notice")).to_be_hidden()
            await say(page, "Hi")
            await answered(page)
            assert await texts(page) == ["Hi", "Yes"]
            await page.reload()
            await ready(page)  # the tab knows the key, the browser does not
            assert await page.evaluate("localStorage.getItem('tercet.key')") is None


@pytest.mark.usefixtures("late_headers")
@pytest.mark.parametrize(
    ("kind", "title"),
    [
        (pb.ERROR_KIND_CONTEXT_LENGTH, "The conversation is too long for this model"),
        (pb.ERROR_KIND_OVERLOADED, "The server is busy"),
        (pb.ERROR_KIND_INTERNAL, "The server had an error"),
    ],
)
async def test_refusals_are_shown_in_place(text: ModelText, visit: Visit, kind: Any, title: str) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url, expect="status of") as page:
        await ready(page)
        await say(page, "Hello")
        (await core.next_request()).reject(kind, "Not <today>.")
        await answered(page)
        error = page.locator(".error")
        await playwright_api.expect(error.locator("strong")).to_have_text(title)
        await playwright_api.expect(error).to_contain_text("Not <today>.")
        await error.get_by_role("button", name="Try again").click()
        request = await core.next_request()
        request.send(*ids(text, "Hi!"), EOS, finish=STOP, stop_id=EOS)
        await answered(page)
        assert await texts(page) == ["Hello", "Hi!"]
        await playwright_api.expect(page.locator(".error:visible")).to_have_count(0)


async def test_an_answer_that_breaks_off_keeps_what_came(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await say(page, "Hello")
        request = await core.next_request()
        request.send(*ids(text, "So far"))
        await playwright_api.expect(page.locator(".md")).to_have_text("So far")
        request.fail(pb.ERROR_KIND_INTERNAL, "The logits are not finite.")
        await answered(page)
        await playwright_api.expect(page.locator(".error")).to_contain_text("The logits are not finite.")
        assert await texts(page) == ["Hello", "So far"]
        await page.reload()
        await playwright_api.expect(page.locator(".error")).to_contain_text("The logits are not finite.")


async def test_a_page_that_was_opened_too_early_becomes_ready_by_itself(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core], ready=False) as front_end:
        async with visit(front_end.url, expect="503") as page:
            await playwright_api.expect(page.locator("#notice")).to_contain_text("tokenizer")
            front_end.admission.loaded(one_model(text, front_end.cores))
            await front_end.cores.wait_until_ready()
            await ready(page)
            await playwright_api.expect(page.locator("#notice")).to_be_hidden()


async def test_a_server_that_is_gone(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url, expect="ERR_") as page:
        await ready(page)
        await page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
        await say(page, "Hello")
        await answered(page)
        await playwright_api.expect(page.locator(".error strong")).to_have_text("No connection")
        await playwright_api.expect(page.locator(".error")).to_contain_text("still running")


# ---------------------------------------------------------------------------------------------------- how it looks

EVIL = """<script>document.title = "owned"</script> <img src=x onerror="document.title='owned'">

[a](javascript:document.title='owned') [b](data:text/html,x) ![c](https://evil.example/c.png) [d](https://good.example/?q="><b>)

<https://fine.example/> and **bold <i>text</i>**

| <b>x</b> | y |
|---|---|
| `<s>` | z |

```html
<script>1</script>
```"""


async def test_what_a_model_writes_stays_text(text: ModelText, visit: Visit) -> None:
    async with FakeCore(outputs=always(text, EVIL)) as core, running(text, [core]) as front_end:
        async with visit(front_end.url, permissions=["clipboard-read", "clipboard-write"]) as page:
            await ready(page)
            await say(page, "<img src=x onerror=alert(1)>")
            await answered(page)
            tags = await page.evaluate(
                "[...new Set([...document.querySelectorAll('.message .text *')].map((node) => node.localName))].sort()"
            )
            assert tags == [
                "a", "button", "code", "div", "figcaption", "figure", "p", "pre", "span", "strong", "table", "tbody",
                "td", "th", "thead", "tr",
            ]  # fmt: skip
            attributes = await page.evaluate(
                "[...document.querySelectorAll('.message .text a')].map((a) => [a.textContent, a.href, a.rel])"
            )
            rel = "noopener noreferrer nofollow"
            assert attributes == [
                ["c", "https://evil.example/c.png", rel],
                ["d", "https://good.example/?q=%22%3E%3Cb%3E", rel],
                ["https://fine.example/", "https://fine.example/", rel],
            ]
            assert "owned" not in await page.title()
            await page.locator(".code").get_by_role("button", name="Copy").click()
            await playwright_api.expect(page.locator(".code button.done")).to_have_count(1)
            assert await page.evaluate("navigator.clipboard.readText()") == "<script>1</script>"
            await page.locator(".assistant").get_by_label("Copy").last.click()
            await playwright_api.expect(page.locator(".actions .done")).to_have_count(1)
            assert await page.evaluate("navigator.clipboard.readText()") == EVIL


async def test_markup_cannot_be_set_at_all(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with visit(front_end.url, expect="TrustedHTML|Trusted Type|Content Security Policy") as page:
            raised = await page.evaluate(
                "(() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } })()"
            )
            assert raised == "TypeError"


async def test_growing_text_keeps_finished_blocks(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await say(page, "Hello")
        request = await core.next_request()
        request.send(*ids(text, "# One\n\nTwo"))
        await playwright_api.expect(page.locator(".md p")).to_have_text("Two")
        await page.evaluate("document.querySelector('.md h3').mark = true")
        request.send(*ids(text, " and three\n\n- four"), EOS, finish=STOP, stop_id=EOS)
        await answered(page)
        await playwright_api.expect(page.locator(".md li")).to_have_text("four")
        assert await page.evaluate("document.querySelector('.md h3').mark")


async def test_reasoning_is_folded(text: ModelText, visit: Visit) -> None:
    deltas: list[dict[str, str]] = [
        {"role": "assistant", "content": ""}, {"reasoning_content": "Let me "}, {"reasoning_content": "think."},
        {"content": "42"},
    ]  # fmt: skip
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": 5}})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    async with FakeCore() as core, running(text, [core]) as front_end, visit(front_end.url) as page:
        await ready(page)
        await page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=stream, headers={"Content-Type": "text/event-stream"}),
        )
        await say(page, "Hello")
        await answered(page)
        await playwright_api.expect(page.locator(".md")).to_have_text("42")
        thoughts = page.locator(".reasoning .body")
        await playwright_api.expect(thoughts).to_be_hidden()
        await page.locator(".reasoning summary").click()
        await playwright_api.expect(thoughts).to_have_text("Let me think.")
        await playwright_api.expect(thoughts).to_be_visible()


async def test_colours_follow_the_system_and_the_switch(text: ModelText, visit: Visit) -> None:
    async def background(page: Any) -> int:
        colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    async with FakeCore() as core, running(text, [core]) as front_end:
        async with visit(front_end.url, color_scheme="dark") as page:
            assert await background(page) < 150
            await page.emulate_media(color_scheme="light")
            assert await background(page) > 700
            await page.get_by_label("dark", exact=True).check()
            assert await background(page) < 150
            await page.reload()
            assert await background(page) < 150
            await page.get_by_label("as the system").check()
            assert await background(page) > 700


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 2560])
async def test_every_width(text: ModelText, visit: Visit, width: int) -> None:
    answer = (
        "word " * 60
        + "\n\n```\n"
        + "x" * 400
        + "\n```\n\n|"
        + " column |" * 30
        + "\n|"
        + "---|" * 30
        + "\n"
        + "y" * 300
    )
    async with FakeCore(outputs=always(text, answer)) as core, running(text, [core]) as front_end:
        async with visit(front_end.url, viewport={"width": width, "height": 700}) as page:
            await ready(page)
            await say(page, "unbroken" * 60)
            await answered(page)
            for selector in ("html", "#scroll"):
                inner, outer = await page.evaluate(
                    "(selector) => { const node = document.querySelector(selector);"
                    " return [node.scrollWidth, node.clientWidth]; }",
                    selector,
                )
                assert inner <= outer, selector
            box = await page.locator("#composer").bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= 700
            line = await page.locator(".md p").first.bounding_box()
            assert line is not None
            assert line["width"] <= 760, "lines stay readable"

            narrow = width <= 768
            await playwright_api.expect(page.locator("#open-sidebar")).to_be_visible(visible=narrow)
            assert await page.evaluate("document.getElementById('sidebar').inert") is narrow
            if narrow:
                await page.click("#open-sidebar")
                await playwright_api.expect(page.locator("#new-chat")).to_be_focused()
                await page.keyboard.press("Escape")
                await playwright_api.expect(page.locator("#sidebar")).to_be_hidden()
                await playwright_api.expect(page.locator("#open-sidebar")).to_be_focused()


async def test_everything_that_can_be_used_has_a_name(text: ModelText, visit: Visit) -> None:
    async with FakeCore(outputs=always(text, "- [x] a\n\n```py\n1\n```")) as core, running(text, [core]) as front_end:
        async with visit(front_end.url) as page:
            await ready(page)
            await say(page, "Hello")
            await answered(page)
            await page.click("#open-settings")
            nameless = await page.evaluate(
                """[...document.querySelectorAll('button, input, select, textarea, a, summary')].filter((node) => {
                  const label = [...(node.labels ?? [])].map((found) => found.textContent).join('');
                  return !(node.ariaLabel || label || node.textContent).trim();
                }).map((node) => node.outerHTML)"""
            )
            assert nameless == []
            roles = await page.evaluate("document.getElementById('thread').getAttribute('role')")
            assert roles == "log"
            await playwright_api.expect(page.locator("#status")).to_have_text("The answer is complete.")
            # The first stop of the keyboard leads past the list, and loses nothing.
            first = await page.evaluate("document.querySelector('a, button, input, select, textarea').className")
            assert first == "skip"
            await page.locator(".skip").press("Enter")
            await playwright_api.expect(page.locator("#prompt")).to_be_focused()
            await playwright_api.expect(page.locator(".message")).to_have_count(2)


async def test_scrolling_up_is_left_in_peace(text: ModelText, visit: Visit) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        async with visit(front_end.url, viewport={"width": 900, "height": 500}) as page:
            await ready(page)
            await say(page, "Hello")
            request = await core.next_request()
            request.send(*ids(text, "line\n\n" * 40))
            at_end = (
                "(() => { const s = document.getElementById('scroll');"
                " return s.scrollHeight - s.clientHeight - s.scrollTop < 30; })()"
            )
            await playwright_api.expect(page.locator(".md p")).to_have_count(40)
            assert await page.evaluate(at_end)
            await page.mouse.move(450, 200)
            await page.mouse.wheel(0, -600)
            await playwright_api.expect(page.locator("#latest")).to_be_visible()
            request.send(*ids(text, "more\n\n" * 10), EOS, finish=STOP, stop_id=EOS)
            await answered(page)
            assert not await page.evaluate(at_end)
            await page.click("#latest")
            assert await page.evaluate(at_end)


# ---------------------------------------------------------------------------------------------------- the whole system


async def test_a_real_model_answers(serving: Serving, visit: Visit) -> None:
    async with visit(serving.url) as page:
        await ready(page)
        await page.click("#open-settings")
        await page.fill("#p-temperature", "0")
        await say(page, "What is the capital of France?")
        await answered(page)
        assert await texts(page) == ["What is the capital of France?", "The capital of France is Paris."]
        await playwright_api.expect(page.locator(".stats")).to_contain_text("8 tokens")
