"""ctypes mirror of ``csrc/program.hpp`` and of the packing of weights."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, Structure, c_bool, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import ClassVar

PANEL = 16
"""Outputs that lie side by side in a packed matrix (``csrc/linear_types.hpp``)."""


class OpKind(enum.IntEnum):
    """Kinds of operations."""

    EMBED = 0
    ANGLES = 1
    NORM = 2
    LINEAR = 3
    ATTENTION = 4


class Epilogue(enum.IntEnum):
    """What becomes of a product."""

    STORE = 0
    STORE_FLOAT = 1
    ADD = 2
    GATED_SILU = 3


class ProgramProblem(enum.IntEnum):
    """Why a program cannot be made or a call was refused, before anything was touched."""

    NONE = 0
    ISA = 1
    MEMORY = 2
    SECTION = 3
    PLAN = 4
    TOKEN_ID = 5


class Op(Structure):
    """One operation; see ``TercetOp``."""

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("epilogue", c_int32),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("panels", c_int32),
        ("layer", c_int32),
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("rotary_half", c_int32),
        ("scalar", c_float),
        ("format", c_int32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("in_stride", c_int64),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("aux", c_void_p),
    ]


class Call(Structure):
    """What a call passes; see ``TercetCall``."""

    _fields_: ClassVar = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("attention", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("in_stride", c_int64),
        ("out_stride", c_int64),
        ("rows", c_int32),
        ("section", c_int32),
        ("highest", c_void_p),
        ("places", c_void_p),
        ("finite", c_void_p),
    ]


class Draw(Structure):
    """A row to draw for; see ``TercetDraw``."""

    _fields_: ClassVar = [
        ("logits", c_void_p),
        ("highest", c_float),
        ("temperature", c_float),
        ("top_p", c_float),
        ("log_min_p", c_float),
        ("top_k", c_int32),
        ("key_a", c_uint32),
        ("key_b", c_uint32),
        ("token", c_int64),
    ]


def declare(cdll: ctypes.CDLL) -> None:
    """Declares the signatures of the program's and the packing functions."""
    cdll.tercet_program_create.argtypes = [c_int32, c_int32, c_int32, POINTER(c_int32)]
    cdll.tercet_program_create.restype = c_void_p
    cdll.tercet_program_destroy.argtypes = [c_void_p]
    cdll.tercet_program_destroy.restype = None
    cdll.tercet_program_add.argtypes = [c_void_p, POINTER(Op)]
    cdll.tercet_program_add.restype = c_int32
    cdll.tercet_program_end_section.argtypes = [c_void_p]
    cdll.tercet_program_end_section.restype = c_int32
    cdll.tercet_program_run.argtypes = [c_void_p, POINTER(Call)]
    cdll.tercet_program_run.restype = c_int32
    cdll.tercet_program_profile.argtypes = [c_void_p, c_void_p]
    cdll.tercet_program_profile.restype = None
    cdll.tercet_weights_pack.argtypes = [c_int32, c_void_p, *[c_int32] * 6, c_void_p]
    cdll.tercet_weights_pack.restype = None
    cdll.tercet_weights_pack_quant.argtypes = [c_int32, c_void_p, *[c_int32] * 6, *[c_void_p] * 3]
    cdll.tercet_weights_pack_quant.restype = None
    cdll.tercet_weights_compacts.argtypes = [c_int32]
    cdll.tercet_weights_compacts.restype = c_bool
    cdll.tercet_weights_compact.argtypes = [c_void_p, c_int32, c_int32, c_void_p]
    cdll.tercet_weights_compact.restype = c_int64
    cdll.tercet_logits_scan.argtypes = [c_int32, c_int32, c_void_p, c_int32, c_int32, *[c_void_p] * 3]
    cdll.tercet_logits_scan.restype = None
    cdll.tercet_logits_draw.argtypes = [c_int32, c_int32, c_void_p, c_int32, c_int32]
    cdll.tercet_logits_draw.restype = c_bool
