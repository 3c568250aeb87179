"""`tercet chat` in a pipe: the answer and nothing else on standard output, one sentence for an error."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore
from tests.fakes.ports import free_port

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

ANSWER = "# Paris\n\nThe capital of **France** is Paris. 🙂"


async def test_only_the_answer_is_printed(text: ModelText, says: Any, piped: Any) -> None:
    async with FakeCore(outputs=says(ANSWER)) as core, running(text, [core]) as front_end:
        for url in (front_end.url, f"{front_end.url}/", f"{front_end.url}/v1", front_end.url.removeprefix("http://")):
            done = await (await piped("What is the capital of France?\n", "--url", url)).end()
            assert done == (0, ANSWER + "\n", "")
    prompt = text.tokenizer.decode(core.requests[0].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


async def test_parameters_reach_the_server(text: ModelText, says: Any, piped: Any) -> None:
    async with FakeCore(outputs=says("One, two, three")) as core, running(text, [core]) as front_end:
        flags = ["--system=Be brief.", "--temperature=0.5", "--top-p=0.25", "--max-tokens=50", "--stop=, th"]
        done = await (await piped("Count", f"--model={MODEL}", *flags, TERCET_URL=front_end.url)).end()
        assert done == (0, "One, two\n", "")
    (request,) = core.requests
    sampling = request.submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 50)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text.tokenizer.decode(
        request.prompt_ids, skip_special_tokens=False
    )


async def test_the_key(text: ModelText, says: Any, piped: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core], keys=["se,cret"]) as front_end:
        refused = await (await piped("Hi", "--url", front_end.url)).end()
        assert (refused.code, refused.out) == (1, "")
        assert refused.err.startswith("error: No API key was sent")
        assert refused.err.endswith(" Give it with TERCET_API_KEY or --api-key.\n")
        done = await (await piped("Hi", "--url", front_end.url, TERCET_API_KEY='["se,cret"]')).end()
        assert done == (0, "Yes\n", "")


async def test_nothing_answers(piped: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = await (await piped("Hi", "--url", url)).end()
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: Nothing answers at {url}/: start a server")
    assert done.err.count("\n") == 1


async def test_a_proxy_is_no_way_to_this_machine(text: ModelText, says: Any, piped: Any) -> None:
    async with FakeCore(outputs=says("Yes")) as core, running(text, [core]) as front_end:
        done = await (await piped("Hi", "--url", front_end.url, HTTP_PROXY="http://proxy.invalid:1")).end()
    assert done == (0, "Yes\n", "")


async def test_a_model_that_is_not_served(text: ModelText, piped: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        done = await (await piped("Hi", "--url", front_end.url, "--model=other")).end()
    assert done == (1, "", f"error: The server does not serve 'other', but {MODEL}.\n")


async def test_a_server_that_is_not_ready_says_why(text: ModelText, piped: Any) -> None:
    async with FakeCore() as core, running(text, [core], ready=False) as front_end:
        done = await (await piped("Hi", "--url", front_end.url)).end()
    assert (done.code, done.out) == (1, "")
    assert "tokenizer" in done.err


async def test_an_answer_that_fails_midway(text: ModelText, piped: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        process = await piped("Hi", "--url", front_end.url)
        request = await core.next_request()
        request.send(*text.tokenizer.encode("So far", add_special_tokens=False))
        request.fail(pb.ERROR_KIND_INTERNAL, "The logits are not finite.")
        done = await process.end()
    assert done == (1, "So far\n", "error: The logits are not finite.\n")


async def test_a_refused_request(text: ModelText, piped: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        done = await (await piped("Hi", "--url", front_end.url, "--temperature=-1")).end()
    assert (done.code, done.out) == (1, "")
    assert "temperature" in done.err


async def test_ctrl_c_ends_the_request_too(text: ModelText, piped: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        process = await piped("Hi", "--url", front_end.url)
        request = await core.next_request()
        request.send(*text.tokenizer.encode("So far", add_special_tokens=False))
        assert await process.process.stdout.readexactly(3) == b"So "
        process.process.send_signal(signal.SIGINT)
        done = await process.end()
        await core.wait_for(lambda: request.aborted)
    assert (done.code, done.err) == (130, "")


async def test_a_reader_that_has_had_enough(text: ModelText, piped: Any) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        process = await piped("Hi", "--url", front_end.url)
        request = await core.next_request()
        process.process.stdout._transport.close()
        ids = text.tokenizer.encode("word ", add_special_tokens=False)
        request.send(*ids)
        await core.wait_for(lambda: request.aborted)
        err = await process.process.stderr.read()
        await process.process.wait()
    assert (process.process.returncode, err) == (1, b"")


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data": 3}'])
async def test_something_else_answers(piped: Any, body: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await (await piped("Hi", "--url", url)).end()
    assert done == (1, "", f"error: What answers at {url}/v1 has no OpenAI-style API.\n")


@pytest.mark.parametrize(
    ("question", "arguments", "sentence"),
    [
        ("", [], "Nothing came on standard input"),
        (" \n", [], "Nothing came on standard input"),
        (b"\xff\xfe", [], "not text in UTF-8"),
        ("Hi", ["--url=ftp://x"], "--url"),
        ("Hi", ["--url=http://"], "--url"),
        ("Hi", ["--temperature=warm"], "--temperature"),
    ],
)
async def test_wrong_usage(piped: Any, question: str | bytes, arguments: list[str], sentence: str) -> None:
    done = await (await piped(question, *arguments)).end()
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert sentence in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("missing", ["httpx", "prompt_toolkit"])
def test_a_missing_package_is_one_sentence(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from tercet_shared.cli import main; sys.exit(main(['chat']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert missing in done.stderr
    assert "pip install 'tercet-shared[tools]'" in done.stderr
    assert done.stderr.count("\n") == 1
