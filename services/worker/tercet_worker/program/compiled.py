"""A model whose step is one call into the kernels."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from typing import TYPE_CHECKING, Any

import torch

from tercet_shared.errors import ConfigurationError, InternalError
from tercet_worker.attention.cpu import CpuAttention
from tercet_worker.kernels.step_abi import Call, ProgramProblem
from tercet_worker.layers.cut import Cut
from tercet_worker.parallel.communicator import ALONE
from tercet_worker.program.recorder import EXTERNAL, Exchange, ExchangeKind, Recorder

if TYPE_CHECKING:
    from tercet_worker.kernels.library import Isa, KernelLibrary
    from tercet_worker.models.interface import CausalLM, LayerAttention
    from tercet_worker.parallel.communicator import Communicator
    from tercet_worker.program.recorder import Record


class CompiledModel:
    """Implements ``StepModel`` with a recorded program.

    A row's hidden states and logits are the same to the bit alone and in any batch, as prefill, chunk and decode, with
    any number of threads (for one instruction set).

    Args:
        model: with packed weights; they may be filled later.
        library: the loaded kernels.
        dtype: of the model.
        threads: that compute, the calling one included; the others are started here and end with this object.
        max_tokens: most tokens of a step.
        vocab_size: columns of the logits.
        communicator: to the other ranks that hold the rest of the model. Then the program is cut into sections, and
            between them ranks exchange what they computed.
        isa: instruction set to use; the best one for None.

    Raises:
        ConfigurationError: no memory, no threads, or ``isa`` is not available.
    """

    def __init__(
        self,
        model: CausalLM,
        library: KernelLibrary,
        *,
        dtype: torch.dtype,
        threads: int,
        max_tokens: int,
        vocab_size: int,
        communicator: Communicator = ALONE,
        isa: Isa | None = None,
    ) -> None:
        self._communicator = communicator
        self.max_tokens = max_tokens
        """Most rows of a step."""
        topology = communicator.topology
        recorder = Recorder(dtype, leads=topology.tp_rank == 0)
        hidden = model.hidden(recorder)
        layers = len(recorder.records)
        if topology.last:
            model.logits(recorder, EXTERNAL)
        self._vocab = recorder.vocab or Cut.all(vocab_size)
        self._placed = recorder.place(max_tokens, hidden)
        self._embedding = next((each.embedding for each in recorder.exchanges if each.embedding is not None), None)
        self._tensors = recorder.tensors  # kept: the operations hold their addresses
        self.names = [record.name for record in recorder.records]
        """What each operation is, for measurements."""
        self.weight_bytes = [record.weight_bytes for record in recorder.records]
        """What each product reads of weights."""
        self.cdll = library.cdll
        self._run: Any = library.cdll.tercet_program_run
        problem = ctypes.c_int32()
        self.isa = library.require(isa)
        number = 0 if dtype == torch.float32 else 1
        handle = self.cdll.tercet_program_create(number, int(self.isa), threads, byref(problem))
        if handle is None:
            raise ConfigurationError(f"the compiled step cannot be set up ({ProgramProblem(problem.value).name})")
        self.handle: int = handle
        """The program, for other calls into the kernels."""
        self._release = weakref.finalize(self, self.cdll.tercet_program_destroy, handle)
        self._sections = 0
        self._script: list[int | Exchange] = []  # sections of the program, and what is exchanged between them
        start = 0
        for exchange in recorder.exchanges:
            if exchange.after > start:
                self._script.append(self._add_section(recorder.records[start : exchange.after]))
                start = exchange.after
            self._script.append(exchange)
        if layers > start:
            self._script.append(self._add_section(recorder.records[start:layers]))
        self._layers = Call()
        self._head = Call(section=self._add_section(recorder.records[layers:]))

    def _add_section(self, records: list[Record]) -> int:
        for record in records:
            if code := self.cdll.tercet_program_add(self.handle, byref(record.op)):
                raise ConfigurationError(f"the compiled step cannot be set up ({ProgramProblem(code).name})")
        self.cdll.tercet_program_end_section(self.handle)
        self._sections += 1
        return self._sections - 1

    @property
    def hidden(self) -> torch.Tensor:
        """Where every forward pass leaves its hidden states, ``[max_tokens, H]``."""
        return self._placed.result

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """See ``StepModel``."""
        if not isinstance(attention, CpuAttention):
            raise InternalError("a compiled step needs the attention of the kernels")
        rows = len(token_ids)
        if rows > self.max_tokens or len(positions) != rows:
            raise InternalError(f"{rows} tokens in a step that was made for {self.max_tokens}")
        others: torch.Tensor | None = None  # tokens whose embeddings other ranks hold
        if self._embedding is not None:
            token_ids, others = self._embedding.own(token_ids)
        token_ids = token_ids.to(torch.int32).contiguous()
        positions = positions.to(torch.int64).contiguous()
        call = self._layers
        call.token_ids = token_ids.data_ptr()
        call.positions = positions.data_ptr()
        call.attention = attention.handle
        call.rows = rows
        for part in self._script:
            if isinstance(part, int):
                call.section = part
                self._check(self._run(self.handle, byref(call)))
            else:
                self._exchange(part, rows, others)
        return self._placed.result[:rows]

    def _exchange(self, exchange: Exchange, rows: int, others: torch.Tensor | None) -> None:
        lines = self._placed.lines(exchange.value)[:rows]
        stream = lines[:, : exchange.value.columns]
        if exchange.kind is ExchangeKind.EMBED and others is not None:
            stream.masked_fill_(others.unsqueeze(1), 0)
        if exchange.kind in (ExchangeKind.EMBED, ExchangeKind.SUM):
            self._communicator.all_reduce_(lines)  # what lies between rows as well: one run of memory
        elif exchange.kind is ExchangeKind.SEND:
            self._communicator.send_stream(stream)
        else:
            received = stream if stream.is_contiguous() else torch.empty(stream.shape)
            self._communicator.receive_stream(received)
            if received is not stream:
                stream.copy_(received)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StepModel``."""
        columns = len(self._vocab)
        logits = torch.empty((len(hidden), columns), dtype=torch.float32)
        call = self._head
        call.output = logits.data_ptr()
        call.out_stride = 4 * columns
        call.places = None
        self._run_head(hidden)
        return self._communicator.gather_logits(logits, self._vocab) if self._vocab.partial else logits

    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what ``sampling.sampler.best_of`` finds in ``logits(hidden)``, which are not kept.

        Of a hundred rows they take 20 MiB, through which memory limits what the processor could compute.

        Raises:
            InternalError: this rank has only a part of the vocabulary.
        """
        if self._vocab.partial:
            raise InternalError("the best logit of a part of the vocabulary was asked for")
        rows = len(hidden)
        highest = torch.empty(rows, dtype=torch.float32)
        places = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        call = self._head
        call.output = None
        call.highest, call.places, call.finite = highest.data_ptr(), places.data_ptr(), finite.data_ptr()
        self._run_head(hidden)
        return highest, places, finite

    def _run_head(self, hidden: torch.Tensor) -> None:
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        call = self._head
        call.input = hidden.data_ptr()
        call.in_stride = hidden.stride(0) * hidden.element_size()
        call.rows = len(hidden)
        self._check(self._run(self.handle, byref(call)))

    def profile(self, ns: ctypes.Array[ctypes.c_int64] | None) -> None:
        """Has the nanoseconds of every operation's last run written to ``ns``, one per name; None ends that."""
        self.cdll.tercet_program_profile(self.handle, ns)

    def _check(self, code: int) -> None:
        if code:
            raise InternalError(f"the compiled step was refused: {ProgramProblem(code).name}")
