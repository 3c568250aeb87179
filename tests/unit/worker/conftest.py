"""Settings and fixtures of the worker's unit tests."""

from __future__ import annotations

import os

# Before torch is imported: OpenMP reads it when it is loaded. Threads that spin at a barrier while others wait for
# their core make tests on a busy machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from tercet_worker.kernels.library import KernelLibrary, load_kernels


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    """The compiled kernels, from the cache where they are there."""
    return load_kernels()
