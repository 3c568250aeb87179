"""What the CUDA worker does with torch's compiler, streams, and memory that has run out, as far as a CPU shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are run with Triton's interpreter")

from torch._dynamo.utils import counters

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.config import WorkerSettings, parse
from tercet_shared.errors import ConfigurationError
from tercet_worker.cuda.machine import compiled
from tercet_worker.cuda.streams import _Copied
from tercet_worker.graphs.compute import TorchLayers
from tercet_worker.graphs.model import Functions
from tercet_worker.graphs.program import Compute, Segment, record
from tercet_worker.layers.fp8 import Fp8Choice
from tercet_worker.layers.parameters import Placement
from tercet_worker.models import create_model
from tercet_worker.parallel.topology import Topology
from tercet_worker.platforms.cuda import CudaPlatform
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.gpu import fake_machine

CPU = torch.device("cpu")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fp8", [None, Fp8Choice(every=True, row_scaled=False)])
def test_each_function_is_compiled_for_one_token_and_once_for_all_other_sizes(
    tmp_path: Path, fp8: Fp8Choice | None
) -> None:
    # Of several ranks: the program is cut at sums over them, too, so it has the most functions.
    config = Checkpoint.open(str(write_tiny_llama(tmp_path / "tiny", layers=3))).config
    topology = Topology(tensor=2, pipeline=1, rank=0)
    place = Placement(torch.float32, CPU, fp8=fp8)
    program = record(create_model(config, place, topology.share(config)), torch.float32)
    parts = [part for part in program.parts if isinstance(part, Segment)]
    computes = [step for part in parts for step in part.steps if isinstance(step, Compute)]
    for compute in computes:
        for tensor in compute.tensors:
            tensor.zero_()
    functions = Functions(TorchLayers(), torch.float32, lambda function: compiled(function, backend="eager"))
    ids, stream = torch.zeros(64, dtype=torch.int32), torch.zeros(64, program.hidden_size)
    attended = torch.zeros((64, program.query_width))
    counters.clear()
    with torch.inference_mode():
        for tokens in (64, 48, 2, 1, 16):
            for compute in computes:
                functions.of(compute)(ids[:tokens], stream[:tokens], attended[:tokens], compute.tensors)
    assert len(functions) == 5
    assert counters["stats"]["unique_graphs"] == 2 * len(functions)


def test_torch_knows_the_options_of_its_compiler() -> None:
    compiled(lambda _ids, stream, _attended, _tensors: stream)


class Done:
    """An event."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        assert Chosen.now == torch.device("cuda", 1)


class Chosen:
    """Stands for ``torch.cuda.device``."""

    now: torch.device | None = None


def test_a_thread_that_waits_sets_up_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def choose(device: torch.device) -> Iterator[None]:
        monkeypatch.setattr(Chosen, "now", device)
        yield

    monkeypatch.setattr(torch.cuda, "device", choose)
    _Copied([], Done(), torch.device("cuda", 1)).wait()
    assert Chosen.now is not None


def test_a_capture_that_memory_ends_is_one_sentence() -> None:
    platform = CudaPlatform(parse(WorkerSettings, ["none"]), fake_machine(memory=2**30))

    def leave() -> None:
        with platform._memory("capturing"):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(ConfigurationError, match=r"^The GPU ran out of memory while capturing: 1\.0 of 1\.0 GiB"):
        leave()
    with pytest.raises(RuntimeError, match="another"), platform._memory("capturing"):
        raise RuntimeError("another")
