"""How ranks that compute one model together exchange what each of them needs of the others.

Three kinds of traffic, each over a process group of its own, so that none waits for another:

* within a stage: sums of the residual stream and parts of the logits, among its tensor-parallel ranks;
* along the pipeline: the residual stream, from each rank to the one at the same place in the next stage;
* back: drawn tokens, from each rank of the last stage to the one at the same place in the first.

All ranks execute the same plans in the same order, so nothing says what a message is: it is the next one.

Legend: T tokens of the step, H hidden size, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from tercet_shared.errors import InternalError, LinkError
from tercet_worker.parallel.failures import LOST_PEERS
from tercet_worker.parallel.topology import SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tercet_worker.layers.cut import Cut
    from tercet_worker.parallel.topology import Topology

_MOST_SENDS = 64
"""Messages under way to one rank; a sender that is so far ahead waits."""


class GroupBrokenError(LinkError):
    """Another rank is gone or does not take part; what this one computes is of no use any more."""


class Incoming(Protocol):
    """A message that was asked for and may not have come yet."""

    def come(self) -> bool:
        """Returns whether `wait` would return at once."""
        ...

    def wait(self) -> torch.Tensor:
        """Waits for the message and returns it. Raises GroupBrokenError."""
        ...


class Communicator(Protocol):
    """One rank's access to the others. Used on the device thread; all raise GroupBrokenError where a rank is gone."""

    @property
    def topology(self) -> Topology:
        """Which rank of which group this is."""
        ...

    def all_reduce_(self, stream: torch.Tensor) -> None:
        """Replaces ``stream``, contiguous, by the sum over the ranks of the stage, the same to the bit in all."""
        ...

    def gather_logits(self, part: torch.Tensor, vocab: Cut) -> torch.Tensor:
        """Returns float32 logits ``[R, V]``, contiguous, from each rank's ``[R, its part of the vocabulary]``."""
        ...

    def send_stream(self, stream: torch.Tensor) -> None:
        """Hands ``[T, H]`` to the next stage; it may be overwritten afterwards."""
        ...

    def receive_stream(self, stream: torch.Tensor) -> None:
        """Fills ``[T, H]``, contiguous, with what the stage before hands over."""
        ...

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Sends drawn tokens, int32 ``[R]``, from the last stage to the first."""
        ...

    def receive_tokens(self, count: int) -> Incoming:
        """Asks for the next tokens that the last stage sends: int32 ``[count]``."""
        ...

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Returns the least of every value over all ranks. All ranks call it; waits for the slowest."""
        ...

    def close(self) -> None:
        """Leaves the group. No other method may be called afterwards, nor while one runs."""
        ...


class Alone:
    """A `Communicator` for the only rank: there is nobody to talk to, and it costs nothing."""

    topology = SINGLE

    def all_reduce_(self, stream: torch.Tensor) -> None:
        """Does nothing: the sum over one rank."""

    def gather_logits(self, part: torch.Tensor, vocab: Cut) -> torch.Tensor:  # noqa: ARG002  # see Communicator
        """Returns ``part``, which is everything."""
        return part

    def send_stream(self, stream: torch.Tensor) -> None:  # noqa: ARG002, D102  # see Communicator
        raise _no_peer()

    def receive_stream(self, stream: torch.Tensor) -> None:  # noqa: ARG002, D102  # see Communicator
        raise _no_peer()

    def send_tokens(self, tokens: torch.Tensor) -> None:  # noqa: ARG002, D102  # see Communicator
        raise _no_peer()

    def receive_tokens(self, count: int) -> Incoming:  # noqa: ARG002, D102  # see Communicator
        raise _no_peer()

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Returns ``values``."""
        return list(values)

    def close(self) -> None:
        """Does nothing."""


ALONE = Alone()
"""Where there is only one rank."""


def _no_peer() -> InternalError:
    return InternalError("a rank that is alone was to talk to another one")


class ProcessGroups:
    """Implements `Communicator` with ``torch.distributed``, whose default group (gloo) is set up and has all ranks.

    On GPUs NCCL adds up and gathers. On CPUs ranks send each other what they have: gloo's own collectives hand every
    call to a thread of theirs, which takes several times as long for the few rows of a decode step. And each rank adds
    up in the order of ranks, so that a row's sum does not depend on where in a batch it stands.

    Args:
        topology: this rank's place.
        device: where the model is.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self._device = device
        self._collective = device.type == "cuda"
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        backend = "nccl" if device.type == "cuda" else "gloo"
        tensor, stages = topology.tensor, topology.pipeline
        self._stage_group: dist.ProcessGroup | None = None
        self._from: dist.ProcessGroup | None = None
        self._to: dist.ProcessGroup | None = None
        self._back: dist.ProcessGroup | None = None
        self._gathered = torch.empty(0, device=device)
        with _with_peers("setting up its process groups"):
            # All ranks make all groups, in the same order; those of others are of no use to this one.
            if tensor > 1:
                for stage in range(stages):
                    group = dist.new_group([stage * tensor + place for place in range(tensor)], backend=backend)
                    if stage == topology.stage:
                        self._stage_group = group
            if stages == 1:
                return
            for place in range(tensor):
                ranks = [stage * tensor + place for stage in range(stages)]
                for stage in range(stages - 1):
                    group = dist.new_group([ranks[stage], ranks[stage + 1]], backend=backend)
                    if place == topology.tp_rank and stage == topology.stage:
                        self._to = group
                    if place == topology.tp_rank and stage + 1 == topology.stage:
                        self._from = group
                group = dist.new_group([ranks[0], ranks[-1]], backend=backend)
                if place == topology.tp_rank and (topology.first or topology.last):
                    self._back = group

    def all_reduce_(self, stream: torch.Tensor) -> None:
        """See `Communicator`."""
        with _with_peers("adding up with the other ranks"):
            if self._collective:
                dist.all_reduce(stream, group=self._stage_group)
                return
            first, second, *more = self._gather(stream).unbind()
            torch.add(first, second, out=stream)
            for part in more:
                stream += part

    def gather_logits(self, part: torch.Tensor, vocab: Cut) -> torch.Tensor:
        """See `Communicator`."""
        each = -(-vocab.whole // self.topology.tensor)
        if part.shape[1] < each:
            part = torch.nn.functional.pad(part, (0, each - part.shape[1]))
        with _with_peers("gathering logits"):
            parts = self._gather(part.contiguous())  # [tensor, R, each]
        return parts.permute(1, 0, 2).reshape(part.shape[0], -1)[:, : vocab.whole].contiguous()

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns ``[tensor, *shape]`` of what every rank of the stage has; gone with the next call."""
        count = self.topology.tensor * part.numel()
        if self._gathered.numel() < count:
            self._gathered = torch.empty(count, dtype=part.dtype, device=part.device)
        parts = self._gathered[:count].view(self.topology.tensor, *part.shape)
        if self._collective:
            dist.all_gather(list(parts.unbind()), part, group=self._stage_group)
            return parts
        own, first = self.topology.tp_rank, self.topology.stage * self.topology.tensor
        others = [place for place in range(self.topology.tensor) if place != own]
        works: list[Any] = [dist.irecv(parts[place], first + place, group=self._stage_group) for place in others]
        works += [dist.isend(part, first + place, group=self._stage_group) for place in others]
        parts[own] = part
        for work in works:
            work.wait()
        return parts

    def send_stream(self, stream: torch.Tensor) -> None:
        """See `Communicator`."""
        self._send(
            stream.clone(memory_format=torch.contiguous_format), self.topology.peer(self.topology.stage + 1), self._to
        )

    def receive_stream(self, stream: torch.Tensor) -> None:
        """See `Communicator`."""
        with _with_peers("waiting for the stage before"):
            dist.recv(stream, self.topology.peer(self.topology.stage - 1), group=self._from)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """See `Communicator`."""
        self._send(tokens.contiguous(), self.topology.peer(0), self._back)

    def receive_tokens(self, count: int) -> Incoming:
        """See `Communicator`."""
        tokens = torch.empty(count, dtype=torch.int32, device=self._device)
        with _with_peers("waiting for drawn tokens"):
            work = dist.irecv(tokens, self.topology.peer(self.topology.pipeline - 1), group=self._back)
        return _Asked(work, tokens)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """See `Communicator`."""
        agreed = torch.tensor(values, dtype=torch.int64)
        with _with_peers("agreeing on limits"):
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return [int(value) for value in agreed.tolist()]

    def close(self) -> None:
        """See `Communicator`."""
        self._sends.clear()
        dist.destroy_process_group()

    def _send(self, message: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
        with _with_peers("handing on what it computed"):
            work = dist.isend(message, rank, group=group)
            # The memory must live until it is sent.
            self._sends.append((work, message))
            while self._sends and (len(self._sends) > _MOST_SENDS or self._sends[0][0].is_completed()):
                self._sends.popleft()[0].wait()


class _Asked:
    """Implements `Incoming`."""

    def __init__(self, work: Any, tokens: torch.Tensor) -> None:  # torch's type of it says nothing
        self._work = work
        self._tokens = tokens

    def come(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        with _with_peers("waiting for drawn tokens"):
            self._work.wait()
        return self._tokens


@contextmanager
def _with_peers(doing: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch has no narrower one: gloo raises it for a connection that is closed
        first = str(error).partition("\n")[0]
        raise GroupBrokenError(f"{LOST_PEERS} while {doing}: {first}") from error
