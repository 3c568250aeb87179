"""ctypes mirror of ``csrc/decode.hpp``."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from typing import ClassVar


class DecodeOutcome(enum.IntEnum):
    """What came of a call."""

    DRAWN = 0
    COMPUTED = 1
    NOT_PLAIN = 2
    REFUSED = 3


class DecodeTables(Structure):
    """The tables of all slots; see ``TercetDecodeTables``."""

    _fields_: ClassVar = [
        ("occupied", c_void_p),
        ("known", c_void_p),
        ("computed", c_void_p),
        ("cached", c_void_p),
        ("blocks", c_void_p),
        ("asks", c_void_p),
        ("tokens", c_void_p),
        ("block_tables", c_void_p),
        ("sampling", c_void_p),
        ("program", c_void_p),
        ("attention", c_void_p),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("hidden_stride", c_int64),
        ("slots", c_int32),
        ("max_rows", c_int32),
        ("max_model_len", c_int32),
        ("max_blocks", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("vocab_size", c_int32),
        ("sampling_stride", c_int32),
        ("column_temperature", c_int32),
        ("column_top_p", c_int32),
        ("column_log_min_p", c_int32),
        ("column_top_k", c_int32),
        ("column_seed_low", c_int32),
        ("column_seed_high", c_int32),
        ("column_min_len", c_int32),
        ("column_asks", c_int32),
        ("draws", c_int32),
    ]


class DecodePlan(Structure):
    """The columns of a plan, and where its tokens go; see ``TercetDecodePlan``."""

    _fields_: ClassVar = [
        ("slots", c_void_p),
        ("num_tokens", c_void_p),
        ("computed", c_void_p),
        ("samples", c_void_p),
        ("block_offsets", c_void_p),
        ("block_ids", c_void_p),
        ("drawn", c_void_p),
        ("highest", c_void_p),
        ("places", c_void_p),
        ("finite", c_void_p),
        ("rows", c_int32),
    ]


def declare(cdll: ctypes.CDLL) -> None:
    """Declares the signatures of the decoder's functions."""
    cdll.tercet_decoder_create.argtypes = [POINTER(DecodeTables)]
    cdll.tercet_decoder_create.restype = c_void_p
    cdll.tercet_decoder_destroy.argtypes = [c_void_p]
    cdll.tercet_decoder_destroy.restype = None
    cdll.tercet_decoder_run.argtypes = [c_void_p, POINTER(DecodePlan)]
    cdll.tercet_decoder_run.restype = c_int32
