"""Settings of models and cores that cannot work: one sentence, before or after the models are read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tercet_frontend.admission import Admission
from tercet_frontend.backend import run_backend
from tercet_shared.config import FrontendSettings, parse
from tercet_shared.errors import CheckpointError, ConfigurationError, TercetError
from tercet_shared.lifecycle.report import LogReporter
from tests.fakes.checkpoints import write_tiny_llama

CORE = "--core=127.0.0.1:1"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


async def _error(*arguments: str) -> TercetError:
    with pytest.raises(TercetError) as caught:
        async with asyncio.timeout(60):
            await run_backend(
                parse(FrontendSettings, list(arguments)), LogReporter(), Admission(), asyncio.Event(), "front end"
            )
    return caught.value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([CORE, "--model-alias=a=b", "--model-alias=b=a"], "--model-alias: a → b → a leads in a circle"),
        ([CORE, "--model-split=a=x"], "--model-split: 'a': 'x' has no weight"),
        ([CORE, "--model-alias=a=none"], "--model-alias: 'a' leads to 'none', which is no model here"),
        ([CORE, "--model-alias=m=tiny"], "--model-alias: 'm' is the name of a model"),
        (["--core=nowhere"], "'nowhere' is not an address"),
        ([CORE, CORE], "A core is given twice"),
        ([], "No core is given"),
        (["--redis-url=redis://x", "--no-discover-cores"], "No core is given"),
        (["--redis-url=nowhere"], "The address of Redis must be"),
    ],
)
async def test_what_cannot_work(source: Path, flags: list[str], message: str) -> None:
    error = await _error(*flags, f"m={source}")
    assert isinstance(error, ConfigurationError)
    assert message in error.message


async def test_a_model_that_is_not_there(source: Path, tmp_path: Path) -> None:
    error = await _error(CORE, f"m={source}", f"n={tmp_path}/none")
    assert isinstance(error, CheckpointError)
    assert "none" in error.message
