"""Runs every operation of a program on random shapes in a kernel library built with sanitizers. Without torch.

Every array is exactly as large as the kernels may use it, so that the address sanitizer sees one element too many.
Usage: ``program_sanitized.py LIBRARY``, with the sanitizer's runtime preloaded.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from ctypes import byref

import numpy as np

from tercet_worker.kernels import step_abi
from tercet_worker.kernels.step_abi import PANEL, Call, Draw, Epilogue, Op, OpKind

QUANTIZED = {1: (4, 32, 2, True), 2: (4, 32, 4, True), 3: (8, 32, 2, False), 4: (8, 16, 4, True)}
"""Of each weight format: bits, columns of a block, bytes of a scale, and whether there are minima."""
COMPACT = 5
SYSTEM = ctypes.CDLL(None)
SYSTEM.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
SYSTEM.free.argtypes = [ctypes.c_void_p]
SYSTEM.free.restype = None


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: int) -> np.ndarray:
    """Returns normal values that own their memory, as float32 or as bfloat16 bits."""
    drawn = rng.standard_normal(shape).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16) if dtype else drawn


def aligned(size: int) -> np.ndarray:
    """Returns uint8 memory that begins at a multiple of 64, and of which the sanitizer knows where it ends."""
    place = ctypes.c_void_p()
    if SYSTEM.posix_memalign(byref(place), 64, size) or place.value is None:
        raise MemoryError
    memory = (ctypes.c_uint8 * size).from_address(place.value)
    weakref.finalize(memory, SYSTEM.free, place.value)
    return np.frombuffer(memory, np.uint8)


def as_float(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


class Run:
    """Programs of one operation in one library, dtype, instruction set and number of threads."""

    def __init__(self, cdll: ctypes.CDLL, dtype: int, isa: int, threads: int) -> None:
        self.cdll, self.dtype, self.isa, self.threads = cdll, dtype, isa, threads

    def call(self, op: Op, source: np.ndarray | None, target: np.ndarray, **fields: int) -> None:
        """Executes ``op``; all of ``target`` must be finite afterwards."""
        problem = ctypes.c_int32()
        program = self.cdll.tercet_program_create(self.dtype, self.isa, self.threads, byref(problem))
        self.cdll.tercet_program_add(program, byref(op))
        self.cdll.tercet_program_end_section(program)
        call = Call(section=0, rows=len(target), output=target.ctypes.data, out_stride=target.strides[0], **fields)
        if source is not None:
            call.input, call.in_stride = source.ctypes.data, source.strides[0]
        if code := self.cdll.tercet_program_run(program, byref(call)):
            raise SystemExit(f"refused: {code}")
        self.cdll.tercet_program_destroy(program)
        if not np.isfinite(as_float(target)).all():
            raise SystemExit(f"a result of operation {op.kind} is not finite")

    def pack(self, matrix: np.ndarray, *, parts: int) -> tuple[np.ndarray, int]:
        """Returns the packed weights, 64-byte aligned to their end, and how many panels they are."""
        rows, columns = len(matrix) // parts, matrix.shape[1]
        panels = -(-rows // PANEL) * parts
        per_step = 2 if self.dtype else 1
        packed = np.zeros(panels * -(-columns // per_step) * 64, np.uint8)
        for part in range(parts):
            piece = np.array(matrix[part * rows : (part + 1) * rows], order="C")
            self.cdll.tercet_weights_pack(
                self.dtype, packed.ctypes.data, columns, panels, part, parts, 0, rows, piece.ctypes.data
            )
        return packed, panels

    def product(self, rng: np.random.Generator, rows: int, inputs: int, outputs: int, epilogue: Epilogue) -> None:
        gated = epilogue is Epilogue.GATED_SILU
        packed, panels = self.pack(values(rng, (outputs * (2 if gated else 1), inputs), self.dtype), parts=1 + gated)
        bias = values(rng, (panels * PANEL,), 0)
        wide = epilogue in {Epilogue.ADD, Epilogue.STORE_FLOAT} or not self.dtype
        target = np.zeros((rows, outputs), np.float32 if wide else np.uint16)
        op = Op(
            kind=OpKind.LINEAR, epilogue=epilogue, in_features=inputs, out_features=outputs, panels=panels,
            weight=packed.ctypes.data, aux=bias.ctypes.data,
        )  # fmt: skip
        self.call(op, values(rng, (rows, inputs), self.dtype), target)

    def quantized(self, rng: np.random.Generator, rows: int, blocks: int, outputs: int, kind: int) -> None:
        """Packs, multiplies and gathers quantized weights."""
        bits, block, width, minima = QUANTIZED[kind]
        inputs, panels = blocks * block, -(-outputs // PANEL)
        packed = np.zeros(panels * PANEL * (inputs * bits // 8 + blocks * width * (1 + minima)), np.uint8)
        q = rng.integers(0, 1 << bits, (outputs, inputs)).astype(np.uint8)
        scales = rng.standard_normal((outputs, blocks)).astype(np.float16 if width == 2 else np.float32)
        least = scales.copy()
        self.cdll.tercet_weights_pack_quant(
            kind, packed.ctypes.data, inputs, panels, 0, 1, 0, outputs,
            q.ctypes.data, scales.ctypes.data, least.ctypes.data if minima else None,
        )  # fmt: skip
        op = Op(
            kind=OpKind.LINEAR, epilogue=Epilogue.STORE_FLOAT, in_features=inputs, out_features=outputs, panels=panels,
            format=kind, weight=packed.ctypes.data,
        )  # fmt: skip
        self.call(op, values(rng, (rows, inputs), 1), np.zeros((rows, outputs), np.float32))
        ids = rng.integers(0, outputs, rows).astype(np.int32)
        ids[-1] = outputs - 1
        op = Op(
            kind=OpKind.EMBED, in_features=outputs, out_features=inputs, panels=panels, scalar=1.0, format=kind,
            weight=packed.ctypes.data,
        )  # fmt: skip
        self.call(op, None, np.zeros((rows, inputs), np.float32), token_ids=ids.ctypes.data)

    def compact(self, rng: np.random.Generator, rows: int, inputs: int, outputs: int) -> bool:
        """Makes dense weights compact, where they lie and before that, and computes with both: the same bits.

        Returns:
            Whether they became so; otherwise they are untouched.
        """
        parts = int(rng.integers(1, 3))  # two: gated
        matrix = values(rng, (outputs * parts, inputs), 1)
        rare = rng.integers(0, matrix.size, rng.integers(0, matrix.size // 1_500 + 1))
        matrix.reshape(-1)[rare] = rng.choice(np.array([0x0000, 0x8001, 0x0180, 0x5000], np.uint16), len(rare))
        packed, panels = self.pack(matrix, parts=parts)
        for before in (0, 64 * int(rng.integers(1, 9))):
            place = aligned(before + len(packed))
            place[before:] = packed
            size = self.cdll.tercet_weights_compact(place.ctypes.data + before, inputs, panels, place.ctypes.data)
            if size < 0 or size > len(packed) or (size == 0 and not np.array_equal(place[before:], packed)):
                raise SystemExit(f"{size} bytes of compact weights")
            if size == 0:
                return False
            weights = aligned(size)
            weights[:] = place[:size]
            self.same_of_both(rng, rows, inputs, outputs, panels, packed, weights)
        return True

    def same_of_both(
        self, rng: np.random.Generator, rows: int, inputs: int, outputs: int, panels: int,
        dense: np.ndarray, compact: np.ndarray,
    ) -> None:  # fmt: skip
        """Products, their best, and embeddings of dense weights and of compact ones."""
        gated = panels != -(-outputs // PANEL)
        x = values(rng, (rows, inputs), 1)
        ids = rng.integers(0, outputs, rows).astype(np.int32)
        ids[-1] = outputs - 1
        found: list[list[np.ndarray]] = []
        for kind, weights in ((0, dense), (COMPACT, compact)):
            results = []
            for epilogue in [Epilogue.GATED_SILU] if gated else [Epilogue.STORE, Epilogue.STORE_FLOAT, Epilogue.ADD]:
                wide = epilogue in {Epilogue.ADD, Epilogue.STORE_FLOAT}
                results.append(np.zeros((rows, outputs), np.float32 if wide else np.uint16))
                op = Op(
                    kind=OpKind.LINEAR, epilogue=epilogue, in_features=inputs, out_features=outputs, panels=panels,
                    format=kind, weight=weights.ctypes.data,
                )  # fmt: skip
                self.call(op, x, results[-1])
            if not gated:
                highest, places, finite = np.zeros(rows, np.float32), np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
                op.epilogue = Epilogue.STORE_FLOAT
                self.call(
                    op, x, np.zeros((rows, 1), np.float32),
                    highest=highest.ctypes.data, places=places.ctypes.data, finite=finite.ctypes.data,
                )  # fmt: skip
                stream = np.zeros((rows, inputs), np.float32)
                op = Op(
                    kind=OpKind.EMBED, in_features=outputs, out_features=inputs, panels=panels, scalar=1.0, format=kind,
                    weight=weights.ctypes.data,
                )  # fmt: skip
                self.call(op, None, stream, token_ids=ids.ctypes.data)
                results += [highest, places, finite, stream]
            found.append(results)
        if not all(np.array_equal(one.view(np.uint8), other.view(np.uint8)) for one, other in zip(*found, strict=True)):
            raise SystemExit("compact weights give other results than dense ones")

    def others(self, rng: np.random.Generator, rows: int, size: int, vocabulary: int) -> None:
        packed, panels = self.pack(values(rng, (vocabulary, size), self.dtype), parts=1)
        ids = rng.integers(0, vocabulary, rows).astype(np.int32)
        ids[-1] = vocabulary - 1
        stream = np.zeros((rows, size), np.float32)
        op = Op(
            kind=OpKind.EMBED, in_features=vocabulary, out_features=size, panels=panels, scalar=1.0,
            weight=packed.ctypes.data,
        )  # fmt: skip
        self.call(op, None, stream, token_ids=ids.ctypes.data)
        weight = values(rng, (size,), 0)
        op = Op(kind=OpKind.NORM, in_features=size, scalar=1e-5, weight=weight.ctypes.data)
        self.call(op, stream, np.zeros((rows, size), np.uint16 if self.dtype else np.float32))
        positions = rng.integers(0, 9_000, rows)
        frequencies = np.abs(weight)
        op = Op(kind=OpKind.ANGLES, rotary_half=size, weight=frequencies.ctypes.data)
        self.call(op, None, np.zeros((rows, 2 * size), np.float32), positions=positions.ctypes.data)
        logits = values(rng, (rows, size), 0)
        highest, places, finite = np.zeros(rows, np.float32), np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
        self.cdll.tercet_logits_scan(
            self.isa, self.threads, logits.ctypes.data, rows, size,
            highest.ctypes.data, places.ctypes.data, finite.ctypes.data,
        )  # fmt: skip
        if not finite.all() or not np.array_equal(places, logits.argmax(1)):
            raise SystemExit("the best logit was not found")

    def best(self, rng: np.random.Generator, rows: int, inputs: int, outputs: int) -> None:
        """A product of which only the best of every row is kept."""
        packed, panels = self.pack(values(rng, (outputs, inputs), self.dtype), parts=1)
        highest, places, finite = np.zeros(rows, np.float32), np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
        op = Op(
            kind=OpKind.LINEAR, epilogue=Epilogue.STORE_FLOAT, in_features=inputs, out_features=outputs, panels=panels,
            weight=packed.ctypes.data,
        )  # fmt: skip
        self.call(
            op, values(rng, (rows, inputs), self.dtype), np.zeros((rows, 1), np.float32),
            highest=highest.ctypes.data, places=places.ctypes.data, finite=finite.ctypes.data,
        )  # fmt: skip
        if not finite.all() or places.min() < 0 or places.max() >= outputs:
            raise SystemExit("the best of a product was not found")

    def draws(self, rng: np.random.Generator, rows: int, size: int) -> None:
        """Draws from all tokens, and from those that top-k and top-p leave."""
        logits = np.exp(rng.uniform(-3, 3)) * values(rng, (rows, size), 0)
        logits = logits.astype(np.float32)
        draws = (Draw * rows)(
            *(
                (
                    line.ctypes.data, float(line.max()), float(rng.choice([0.3, 1.0, 4.0])),
                    float(rng.choice([1.0, 0.9, 0.1])), float(rng.choice([-np.inf, -1.0])),
                    int(rng.choice([0, 0, 1, 7, 10**6])), int(rng.integers(2**32)), int(rng.integers(2**32)), -1,
                )
                for line in logits
            )
        )  # fmt: skip
        if not self.cdll.tercet_logits_draw(self.isa, self.threads, draws, rows, size):
            raise SystemExit("no memory to draw")
        if not all(0 <= draw.token < size for draw in draws):
            raise SystemExit("what was drawn is no token")


def main() -> None:
    """Every instruction set, both dtypes."""
    cdll = ctypes.CDLL(sys.argv[1])
    step_abi.declare(cdll)
    rng = np.random.default_rng(0)
    runs = 0
    for isa in range(5):
        compact = 0
        if not cdll.tercet_isa_available(isa):
            continue
        for dtype in (0, 1):
            for _ in range(8):
                run = Run(cdll, dtype, isa, int(rng.integers(1, 4)))
                rows, inputs, outputs = (
                    int(n) for n in (rng.integers(1, 120), rng.integers(1, 200), rng.integers(1, 150))
                )
                for epilogue in Epilogue:
                    run.product(rng, rows, inputs, outputs, epilogue)
                run.others(rng, rows, inputs, outputs)
                run.best(rng, rows, inputs, outputs)
                run.best(rng, rows, inputs, int(rng.integers(150, 900)))
                run.draws(rng, rows, outputs)
                run.draws(rng, 3, int(rng.integers(150, 900)))
                if dtype:
                    for kind in QUANTIZED:
                        run.quantized(rng, rows, int(rng.integers(1, 9)), outputs, kind)
                runs += 1
            Run(cdll, dtype, isa, 2).product(rng, 40, 2_101 if dtype else 1_050, 50, Epilogue.STORE)
        if cdll.tercet_weights_compacts(isa):
            # Few rows, one block of steps and several; whole groups of panels and what is left of them.
            for rows in (1, 5, 9, 13, 40, 100, int(rng.integers(1, 200))):
                for outputs in (*(int(n) for n in rng.integers(1, 260, 3)), 64, 112, 120):
                    run = Run(cdll, 1, isa, int(rng.integers(1, 4)))
                    compact += run.compact(
                        rng, rows, 2 * int(rng.choice([rng.integers(1, 40), rng.integers(250, 700)])), outputs
                    )
            if compact < 20:
                raise SystemExit(f"only {compact} matrices became compact")
    print(f"{runs} runs")


if __name__ == "__main__":
    main()
