"""Ranks of a worker on GPUs in name, as processes: see ``gpu.py`` and ``tests/integration/worker/ranks.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tercet_worker import startup
from tercet_worker.platforms.cuda import CudaPlatform
from tests.fakes.gpu import fake_machine
from tests.integration.worker import ranks as module

_serve = module._serve


def _serve_on_gpu(pipe: Connection, argv: list[str], listener: Any) -> None:
    with patch.object(startup, "choose_platform", lambda settings: CudaPlatform(settings, fake_machine())):
        _serve(pipe, argv, listener)


@contextmanager
def gpu_ranks_of(model: Path, tensor: int, pipeline: int, *flags: str) -> Iterator[module.Ranks]:
    """Starts the ranks of one group."""
    with patch.object(module, "_serve", _serve_on_gpu), module.ranks_of(model, tensor, pipeline, *flags) as ranks:
        yield ranks
