"""The flat batch of a step on a GPU: decided on the host, laid out by one kernel, at the place where graphs read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_worker.attention.interface import HostAttention
from tercet_worker.cuda.cascade import worthwhile_blocks
from tercet_worker.cuda.kernels.inputs import lay_out
from tercet_worker.cuda.staging import Staging, room_for
from tercet_worker.graphs.dispatch import StepShape
from tercet_worker.state.batch import HostBatch, InputBatch
from tercet_worker.state.mirror import to_device

if TYPE_CHECKING:
    from tercet_shared.wire.step import StepPlan
    from tercet_worker.cuda.streams import Streams
    from tercet_worker.graphs.dispatch import Dispatcher
    from tercet_worker.graphs.model import StepInputs
    from tercet_worker.state.slots import SlotState


class DeviceBatches:
    """Builds batches.

    Args:
        inputs: where they go.
        dispatcher: says what becomes of a step.
        streams: of the device.
        max_rows: of a step.
        block_size: tokens per KV block.
        cascades: whether attention can take a shared prefix apart.
    """

    def __init__(
        self,
        inputs: StepInputs,
        dispatcher: Dispatcher,
        streams: Streams,
        *,
        max_rows: int,
        block_size: int,
        cascades: bool,
    ) -> None:
        self._inputs = inputs
        self._dispatcher = dispatcher
        self._block_size = block_size
        self._cascades = cascades
        most = room_for(max_rows, max_rows + 1, max_rows, max_rows, max_rows)
        self._staging = Staging(most, inputs.token_ids.device, streams)

    def __call__(self, plan: StepPlan, state: SlotState) -> InputBatch:
        """Returns the batch of an applied plan with at least one row."""
        host = HostBatch.of(plan, state)
        shared = 0
        if self._cascades:
            shared = worthwhile_blocks(state.host_tables, host.slots, host.computed, host.ends, self._block_size)
        shape = StepShape(host.num_tokens, len(host.slots), host.max_query_len, cascade=shared > 0)
        choice = self._dispatcher.choose(shape)
        inputs, padded = self._inputs, choice.tokens
        (slots, starts, computed, ends, unwritten), _ = self._staging.put(
            (host.slots, host.starts, host.computed, host.ends, host.unwritten)
        )
        lay_out(
            slots=slots,
            starts=starts,
            computed=computed,
            unwritten=unwritten,
            tokens=state.tokens,
            block_tables=state.block_tables,
            block_size=self._block_size,
            longest=host.max_query_len,
            padded=padded,
            total=host.num_tokens,
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
        )
        return InputBatch(
            plan_rows=host.plan_rows,
            num_tokens=host.num_tokens,
            input_ids=inputs.token_ids[:padded],
            positions=inputs.positions[:padded],
            query_start_loc=starts,
            seq_lens=ends,
            slots=slots,
            slot_mapping=inputs.slot_mapping[:padded],
            max_query_len=host.max_query_len,
            starts=host.starts,
            samples=host.samples,
            logits_rows=to_device(host.logits_rows, state.device),
            host=HostAttention(host.starts, host.ends, shared, choice),
        )
