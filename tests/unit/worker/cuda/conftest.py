"""The kernels of the CUDA worker on the CPU, with Triton's interpreter."""

from __future__ import annotations

import os

# Before Triton is imported: kernels are made for the interpreter or not when their module is.
os.environ["TRITON_INTERPRET"] = "1"
