"""A real core for front ends of other versions."""

from tests.integration.core.conftest import run_dir, start_core

__all__ = ["run_dir", "start_core"]
