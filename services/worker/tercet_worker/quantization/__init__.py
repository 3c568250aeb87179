"""Weights as integers with scales: from the blocks of a checkpoint to those of the kernels, without loss."""

from tercet_worker.quantization.blocks import Blocks, WeightFormat, common_format
from tercet_worker.quantization.ggml import block_of, decode, format_of
from tercet_worker.quantization.int8 import quantize_rows
from tercet_worker.quantization.packed import PackedRows, is_fp8, is_row_scaled, open_packed

__all__ = [
    "Blocks",
    "PackedRows",
    "WeightFormat",
    "block_of",
    "common_format",
    "decode",
    "format_of",
    "is_fp8",
    "is_row_scaled",
    "open_packed",
    "quantize_rows",
]
