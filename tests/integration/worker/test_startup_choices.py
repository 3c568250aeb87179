"""What the worker decides when it starts: kernels or fallback, and what that means for flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet_shared.errors import ConfigurationError
from tercet_worker.attention.torch_fallback import TorchAttention
from tests.fakes.checkpoints import write_tiny_llama
from tests.integration.worker.driver import Driver, engine_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a compiler, and without kernels that were built before."""
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_the_fallback_serves(model: Path) -> None:
    runner = engine_for(model, "--dtype=float32", "--num-kv-blocks=16", "--max-num-seqs=2").runner
    assert isinstance(runner._attention, TorchAttention)
    driver = Driver(runner)
    request = driver.start(0, [5, 6, 7])
    driver.run(budget=16, outputs=4)
    assert len(request.output) == 4


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_batch_invariance_is_refused(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="--batch-invariant"):
        engine_for(model, "--dtype=float32", "--num-kv-blocks=16", "--max-num-seqs=2", "--batch-invariant")


def test_with_kernels_batch_invariance_is_given(model: Path) -> None:
    runner = engine_for(model, "--num-kv-blocks=16", "--max-num-seqs=2", "--batch-invariant").runner
    assert not isinstance(runner._attention, TorchAttention)
