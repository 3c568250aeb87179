"""`make bench-frontend`: its three processes work together, and its core keeps the contract."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tests.bench.frontend import cpu_seconds, measure, parse
from tests.bench.token_core import Rows
from tests.fakes.checkpoints import write_tiny_llama


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_all_tokens_come_through(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tiny model's vocabulary is smaller than that of which prompts are drawn.
    monkeypatch.setenv("TERCET_VOCABULARY", "10-99")
    model = write_tiny_llama(tmp_path / "model")
    profile = ["--profile"] if endpoint == "chat" else []
    # So many that they take longer than the hundredth of a second in which processor time is counted.
    flags = ["--requests=20", "--tokens=20", "--input-tokens=40", f"--endpoint={endpoint}", *profile]
    found = await measure(6, 0.0, parse([str(model), *flags]))
    assert (found["streams"], found["tokens"], found["failed"]) == (6, 6 * 20 * 20, 0)
    assert found["frontend_cpu_us_per_token"] > 0
    assert found["tokens_per_s"] > 0
    assert 0 < found["events_per_token"] <= 1
    assert bool(profile) == ("tercet_frontend" in capsys.readouterr().err)


def submit(handle: int, limit: int, resumed: int = 0) -> pb.Submit:
    ids = np.zeros(resumed, "<i4").tobytes()
    return pb.Submit(handle=handle, attempt=1, resumed_ids=ids, sampling=pb.Sampling(max_tokens=limit))


def test_rows_get_token_after_token_until_their_limit() -> None:
    rows = Rows(np.array([7, 8, 9], "<i4"))
    rows.add([submit(1, 2), submit(2, 5, resumed=3)])
    first = rows.step().step
    assert np.frombuffer(first.handles, "<u8").tolist() == [1, 2]
    assert np.frombuffer(first.attempts, "<u4").tolist() == [1, 1]
    assert np.frombuffer(first.token_offsets, "<i4").tolist() == [0, 1, 2]
    assert np.frombuffer(first.token_ids, "<i4").tolist() == [7, 7]
    assert np.frombuffer(first.start_rows, "<i4").tolist() == [0]
    assert first.finish_rows == b""
    rows.add([submit(3, 9)])
    second = rows.step().step
    assert np.frombuffer(second.token_ids, "<i4").tolist() == [8, 8, 7]
    assert np.frombuffer(second.finish_rows, "<i4").tolist() == [0, 1]
    assert list(second.finish_reasons) == [pb.FINISH_REASON_LENGTH] * 2
    assert np.frombuffer(second.finish_stop_ids, "<i4").tolist() == [-1, -1]
    rows.remove([3])
    assert len(rows) == 0


def test_processor_time_is_that_of_the_process() -> None:
    before = time.process_time()
    found = cpu_seconds(os.getpid())
    assert before - 0.1 <= found <= time.process_time() + 0.1
