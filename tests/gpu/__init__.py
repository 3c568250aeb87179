"""Checks that need NVIDIA GPUs: ``tests/gpu/run.sh``. Without one they are not run, and say so."""
