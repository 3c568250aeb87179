"""The examples of the documentation run as they are printed, but for the address."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.frontend.conftest import MODEL, TIMEOUT, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
EXAMPLES = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 6


@pytest.mark.parametrize(("language", "source"), EXAMPLES)
async def test_example(text: ModelText, says: Any, language: str, source: str) -> None:
    async with FakeCore(outputs=says("Paris it is.")) as core, running(text, [core]) as front_end:
        source = source.replace("http://127.0.0.1:8000", front_end.url).replace("smollm2", MODEL)
        # A shell fails with its first failing command, and curl with an error status.
        command = [sys.executable, "-c", source] if language == "python" else ["bash", "-euc", _failing(source)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(TIMEOUT * 2):
            out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert out.strip()


def _failing(source: str) -> str:
    # The example that ends a request may come too late or too early here: then an error is what it shows.
    return source if "X-Request-Id" in source else source.replace("curl ", "curl --fail-with-body ")
