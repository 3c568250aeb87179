"""ctypes mirror of ``csrc/attention.hpp``."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar


class AttentionConfig(Structure):
    """What is constant over the life of a KV cache."""

    _fields_: ClassVar = [
        ("kv", c_void_p),
        ("windows", c_void_p),
        ("num_layers", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("run_blocks", c_int32),
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("dtype", c_int32),
        ("isa", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class AttentionStep(Structure):
    """Pointers to the arrays of one step."""

    _fields_: ClassVar = [
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("slots", c_void_p),
        ("block_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_table_stride", c_int64),
        ("requests", c_int32),
        ("tokens", c_int32),
        ("max_slots", c_int32),
        ("max_blocks", c_int32),
    ]


class AttentionProblem(Structure):
    """Why a call was refused, before anything was touched."""

    _fields_: ClassVar = [("code", c_int32), ("row", c_int32), ("value", c_int64), ("limit", c_int64)]


class Problem(enum.IntEnum):
    """Codes of ``AttentionProblem``."""

    NONE = 0
    QUERY_START = 1
    TOKEN_COUNT = 2
    SLOT = 3
    CONTEXT = 4
    CONTEXT_BLOCKS = 5
    BLOCK = 6
    SLOT_MAPPING = 7
    GEOMETRY = 8
    ISA = 9
    MEMORY = 10
    LAYER = 11
    NO_PLAN = 12


def declare(cdll: ctypes.CDLL) -> None:
    """Declares the signatures of the attention functions."""
    cdll.tercet_attention_create.argtypes = [POINTER(AttentionConfig), POINTER(AttentionProblem)]
    cdll.tercet_attention_create.restype = c_void_p
    cdll.tercet_attention_destroy.argtypes = [c_void_p]
    cdll.tercet_attention_destroy.restype = None
    cdll.tercet_attention_plan.argtypes = [c_void_p, POINTER(AttentionStep), POINTER(AttentionProblem)]
    cdll.tercet_attention_plan.restype = c_int32
    cdll.tercet_attention_forward.argtypes = [c_void_p, c_int32, *[c_void_p] * 4, *[c_int64] * 4]
    cdll.tercet_attention_forward.restype = c_int32
