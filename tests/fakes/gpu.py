"""A GPU in name: the CUDA worker on the CPU, with what only a GPU can do replaced at three seams.

FlashInfer's wrappers become loops over rows that read the same arguments from the same memory, a graph becomes running
the work again at its addresses, and a copy to the host is made late, when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tercet_worker.attention.interface import AttentionSpec
from tercet_worker.cuda.memory import Measured
from tercet_worker.graphs.capture import Work
from tercet_worker.graphs.model import Transform
from tercet_worker.platforms.cuda import Machine

CPU = torch.device("cpu")


class FakeEvent:
    """Done at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass
class LateArrival:
    """Copies that are made of what was there when they were asked for, and seen only once they were waited for."""

    tensors: list[Tensor]
    _sources: list[Tensor]

    @torch.inference_mode()
    def wait(self) -> None:
        for target, source in zip(self.tensors, self._sources, strict=True):
            target.copy_(source)


class FakeStreams:
    """Implements ``Streams``."""

    def event(self) -> FakeEvent:
        return FakeEvent()

    def pinned(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def to_host(self, tensors: Sequence[Tensor]) -> LateArrival:
        return LateArrival([torch.full_like(each, 77) for each in tensors], [each.clone() for each in tensors])


@dataclass
class FakeWrapper:
    """Attends row by row, from lists of pages."""

    kind: str
    log: list[str]
    buffers: tuple[Tensor, Tensor, Tensor] | None = None
    schedule: Tensor | None = None
    levels: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, *args: Any, **options: Any) -> None:
        self.log.append(self.kind)
        starts: Any
        if self.kind == "cascade":
            starts, offsets, pages, last = args[:4]
        elif self.kind == "prefill":
            starts, offsets, pages, last = ([each] for each in args[:4])
        else:
            offsets, pages, last = ([each] for each in args[:3])
            starts = [torch.arange(len(last[0]) + 1, dtype=torch.int32)]
        self.levels = []
        for number in range(len(starts)):
            for each in (starts[number], offsets[number], last[number]):
                assert each.device == CPU
                assert each.dtype is torch.int32
            held = (offsets[number].clone(), pages[number], last[number].clone())
            if self.buffers is not None:
                assert len(last[number]) == len(self.buffers[2]), "a graph has its number of rows"
                self.buffers[0].copy_(held[0])
                self.buffers[2].copy_(held[2])
                held = self.buffers
            causal = options.get("causal", True) and number == len(starts) - 1
            self.levels.append({"starts": starts[number].clone(), "lists": held, "causal": causal})
        self.heads = args[-4:-1]
        self.block = args[-1]
        self.options = options

    def run(self, q: Tensor, paged_kv_cache: Tensor, out: Tensor | None = None) -> Tensor:
        assert q.is_contiguous()
        assert tuple(q.shape[1:]) == (self.heads[0], self.heads[2])
        parts = [self._level(level, q, paged_kv_cache) for level in self.levels]
        total = torch.logsumexp(torch.stack([lse for _, lse in parts]), dim=0)
        summed = sum(each * (lse - total).exp().unsqueeze(-1) for each, lse in parts)
        assert isinstance(summed, Tensor)
        result = summed.to(q.dtype)
        return result if out is None else out.copy_(result)

    def _level(self, level: dict[str, Any], q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 results ``[T, Hq, D]`` and the logarithm of each sum of weights ``[T, Hq]``."""
        offsets, pages, last = level["lists"]
        out = torch.empty(q.shape, dtype=torch.float32)
        sums = torch.empty(q.shape[:2])
        assert int(level["starts"][-1]) == len(q)
        for row in range(len(last)):
            begin, end = level["starts"][row : row + 2].tolist()
            ids = pages[offsets[row] : offsets[row + 1]].long()
            context = (len(ids) - 1) * self.block + int(last[row])
            keys, values = (cache[ids, part].flatten(0, 1)[:context].float() for part in (0, 1))
            group = self.heads[0] // self.heads[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->qhk", q[begin:end].float(), keys) * self.options["sm_scale"]
            if self.options["logits_soft_cap"]:
                scores = torch.tanh(scores / self.options["logits_soft_cap"]) * self.options["logits_soft_cap"]
            key = torch.arange(context)
            position = torch.arange(context - (end - begin), context).unsqueeze(1)
            if level["causal"]:
                hidden = key > position
                if self.options["window_left"] >= 0:
                    hidden |= key < position - self.options["window_left"]
                scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
            sums[begin:end] = scores.logsumexp(dim=-1)
            out[begin:end] = torch.einsum("qhk,khd->qhd", scores.softmax(dim=-1), values)
        return out, sums


@dataclass
class FakeWrappers:
    """Implements ``Wrappers``."""

    log: list[str] = field(default_factory=list)  # what was planned, in order
    schedules: int = 0

    def check(self, spec: AttentionSpec) -> None: ...

    def schedule(self) -> Tensor:
        self.schedules += 1
        return torch.zeros(8, dtype=torch.uint8)

    def graph(self, buffers: tuple[Tensor, Tensor, Tensor], schedule: Tensor) -> FakeWrapper:
        return FakeWrapper(f"graph {len(buffers[2])}", self.log, buffers, schedule)

    def decode(self) -> FakeWrapper:
        return FakeWrapper("decode", self.log)

    def prefill(self) -> FakeWrapper:
        return FakeWrapper("prefill", self.log)

    def cascade(self) -> FakeWrapper:
        return FakeWrapper("cascade", self.log)


@dataclass
class RerunCapturer:
    """Implements ``Capturer``: a graph is the same work on the same tensors."""

    captured: int = 0
    replayed: int = 0

    def capture(self, work: Work) -> Work:
        self.captured += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def fake_machine(
    *, dtype: torch.dtype = torch.float32, compiler: Transform | None = None, memory: int = 2**31
) -> Machine:
    """Returns a GPU with ``memory`` bytes of which nothing is used."""
    return Machine(
        device=CPU,
        name="a GPU in name",
        capability=(9, 0),
        streams=FakeStreams(),
        wrappers=FakeWrappers(),
        capturer=RerunCapturer(),
        compiler=compiler,
        measure=lambda: Measured(total=memory, free=memory, reserved=0, peak=0),
        dtype=dtype,
    )
