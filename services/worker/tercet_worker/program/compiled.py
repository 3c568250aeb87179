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
from tercet_worker.program.recorder import EXTERNAL, Recorder

if TYPE_CHECKING:
    from tercet_worker.kernels.library import Isa, KernelLibrary
    from tercet_worker.models.interface import CausalLM, LayerAttention

_LAYERS, _HEAD = 0, 1


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
        isa: Isa | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.max_tokens = max_tokens
        """Most rows of a step."""
        recorder = Recorder(dtype)
        hidden = model.hidden(recorder)
        layers = len(recorder.records)
        model.logits(recorder, EXTERNAL)
        self._placed = recorder.place(max_tokens, hidden)
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
        for index, record in enumerate(recorder.records):
            if index == layers:
                self.cdll.tercet_program_end_section(handle)
            if self.cdll.tercet_program_add(handle, byref(record.op)):
                raise ConfigurationError("the compiled step cannot be set up (MEMORY)")
        self.cdll.tercet_program_end_section(handle)
        self._layers = Call(section=_LAYERS)
        self._head = Call(section=_HEAD)

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
        token_ids = token_ids.to(torch.int32).contiguous()
        positions = positions.to(torch.int64).contiguous()
        call = self._layers
        call.token_ids = token_ids.data_ptr()
        call.positions = positions.data_ptr()
        call.attention = attention.handle
        call.rows = rows
        self._check(self._run(self.handle, byref(call)))
        return self._placed.result[:rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StepModel``."""
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        logits = torch.empty((len(hidden), self._vocab_size), dtype=torch.float32)
        call = self._head
        call.input = hidden.data_ptr()
        call.in_stride = hidden.stride(0) * hidden.element_size()
        call.output = logits.data_ptr()
        call.out_stride = 4 * self._vocab_size
        call.rows = len(hidden)
        self._check(self._run(self.handle, byref(call)))
        return logits

    def profile(self, ns: ctypes.Array[ctypes.c_int64] | None) -> None:
        """Has the nanoseconds of every operation's last run written to ``ns``, one per name; None ends that."""
        self.cdll.tercet_program_profile(self.handle, ns)

    def _check(self, code: int) -> None:
        if code:
            raise InternalError(f"the compiled step was refused: {ProgramProblem(code).name}")
