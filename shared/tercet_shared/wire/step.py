"""The contract between core and worker: what a step is told to do, and what came of it.

Columns are NumPy arrays; sizes grow with what changed, not with history. How they travel: `tercet_shared.wire.frames`.

Legend: S scheduled rows of this step, N slots that begin (or begin again) with this step, int32 unless stated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, NewType

import numpy as np
import numpy.typing as npt

from tercet_shared.pooling import Pooling

if TYPE_CHECKING:
    from tercet_shared.sampling_params import SamplingParams

PROTOCOL_VERSION = 4

Slot = NewType("Slot", int)
"""A row in every per-request table of core and worker, held by one request from admission to its end."""

BlockId = NewType("BlockId", int)
"""A block of the KV pool, 0 to ``num_blocks - 1``."""

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]


def empty_i32() -> I32:
    """Returns an int32 column without rows."""
    return np.zeros(0, np.int32)


@dataclass(slots=True)
class NewSlots:
    """Slots whose whole state the worker replaces before the step: new requests, and preempted ones that resume.

    Ragged columns come as offsets ``[N + 1]`` into a flat array.
    """

    slots: I32  # [N]
    epochs: I32  # [N] changes when the slot changes owner, not when its request is preempted and resumes
    prompt_lens: I32  # [N] tokens of the original prompt; what follows in token_ids is output
    token_offsets: I32  # [N + 1]
    token_ids: I32  # all known tokens of each slot
    cached: I32  # [N] tokens whose KV is in the slot's first blocks, which may be shared: nothing is written there
    temperature: F32  # [N] 0: greedy
    top_k: I32  # [N] 0: off
    top_p: F32  # [N] 1: off
    min_p: F32  # [N] 0: off
    seed: U64  # [N] uint64
    min_len: I32  # [N] tokens (prompt + output) below which the stop ids of the slot are masked
    stop_offsets: I32  # [N + 1]
    stop_ids: I32  # end-of-sequence and stop token ids of each slot (masked while below min_len)
    presence: F32  # [N] 0: off
    frequency: F32  # [N] 0: off
    repetition: F32  # [N] 1: off
    logprobs: I32  # [N] alternatives per output token whose log-probabilities are asked for; -1: none at all
    prompt_logprobs: I32  # [N] the same for prompt tokens
    pooling: I32  # [N] `tercet_shared.pooling.Pooling`; not NONE: the row yields a vector instead of a token
    bias_offsets: I32  # [N + 1]
    bias_ids: I32
    bias_values: F32  # one for each of bias_ids
    allowed_offsets: I32  # [N + 1]; a slot with none allows all tokens
    allowed_ids: I32
    bad_offsets: I32  # [N + 1] into bad_lens
    bad_lens: I32  # tokens of each excluded sequence
    bad_ids: I32  # the sequences, one after the other

    @classmethod
    def empty(cls) -> NewSlots:
        """Returns columns without rows."""
        return cls.build([])

    @classmethod
    def build(cls, rows: list[NewSlot]) -> NewSlots:
        """Returns the columns for ``rows``."""
        params = [row.params for row in rows]
        stops = [row.params.eos_token_ids + row.params.stop_token_ids for row in rows]
        return cls(
            slots=np.array([row.slot for row in rows], np.int32),
            epochs=np.array([row.epoch for row in rows], np.int32),
            prompt_lens=np.array([row.prompt_len for row in rows], np.int32),
            token_offsets=offsets_of([len(row.tokens) for row in rows]),
            token_ids=np.concatenate([row.tokens for row in rows]) if rows else empty_i32(),
            cached=np.array([row.cached for row in rows], np.int32),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array([p.seed for p in params], np.uint64),
            min_len=np.array([row.prompt_len + row.params.min_tokens for row in rows], np.int32),
            stop_offsets=offsets_of([len(ids) for ids in stops]),
            stop_ids=np.array([token for ids in stops for token in ids], np.int32),
            presence=np.array([p.presence_penalty for p in params], np.float32),
            frequency=np.array([p.frequency_penalty for p in params], np.float32),
            repetition=np.array([p.repetition_penalty for p in params], np.float32),
            logprobs=np.array([p.logprobs for p in params], np.int32),
            prompt_logprobs=np.array([p.prompt_logprobs for p in params], np.int32),
            pooling=np.array([row.pooling for row in rows], np.int32),
            bias_offsets=offsets_of([len(p.logit_bias) for p in params]),
            bias_ids=np.array([token for p in params for token, _ in p.logit_bias], np.int32),
            bias_values=np.array([value for p in params for _, value in p.logit_bias], np.float32),
            allowed_offsets=offsets_of([len(p.allowed_token_ids) for p in params]),
            allowed_ids=np.array([token for p in params for token in p.allowed_token_ids], np.int32),
            bad_offsets=offsets_of([len(p.bad_words) for p in params]),
            bad_lens=np.array([len(word) for p in params for word in p.bad_words], np.int32),
            bad_ids=np.array([token for p in params for word in p.bad_words for token in word], np.int32),
        )

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class NewSlot:
    """One row of `NewSlots`, before it becomes columns."""

    slot: Slot
    epoch: int
    prompt_len: int
    tokens: I32  # [known]
    params: SamplingParams
    pooling: Pooling = Pooling.NONE
    cached: int = 0


def lengths_of(offsets: I32) -> I32:
    """Returns the lengths of the runs between ``offsets``; `numpy.diff` takes eight times as long for a few."""
    return offsets[1:] - offsets[:-1]


def offsets_of(lengths: list[int]) -> I32:
    """Returns the offsets ``[n + 1]`` of ``n`` runs of these lengths laid end to end."""
    return np.array([*accumulate(lengths, initial=0)], np.int32)


@dataclass(slots=True)
class StepPlan:
    """One step. The worker executes plans strictly in the order in which they were sent.

    Applied in this order: freed slots, new slots, appended tokens, new block ids, then the forward pass over the
    scheduled rows. A resumed slot comes in ``new`` again, with the same epoch, and its block table starts empty.

    A gated row samples under the `GrammarMask` of its step, which comes after the plan; the worker computes everything
    else meanwhile, and answers the step when all its rows have sampled.
    """

    step_id: int
    freed: I32  # [F] slots whose request ended; the worker forgets them
    new: NewSlots
    slots: I32  # [S] rows of this step, in the scheduler's order
    num_tokens: I32  # [S] tokens to compute, at least 1
    computed: I32  # [S] tokens computed before this step (an upper bound where drafts are in flight)
    samples: Bool  # [S] whether the row yields a token
    block_offsets: I32  # [S + 1] into block_ids
    block_ids: I32  # blocks appended to each row's table before the step
    # Reserved: speculative tokens to verify.
    draft_offsets: I32 = field(default_factory=empty_i32)  # [S + 1] or empty
    draft_ids: I32 = field(default_factory=empty_i32)
    # Tokens that a grammar forces: they follow all known tokens of their row, which has nothing in flight.
    appended_offsets: I32 = field(default_factory=empty_i32)  # [S + 1] or empty
    appended_ids: I32 = field(default_factory=empty_i32)
    gated: I32 = field(default_factory=empty_i32)  # [G] rows (0..S-1, ascending) that sample under their mask
    trace: PlanTrace | None = None  # most plans have none


@dataclass(slots=True)
class PlanTrace:
    """What of a plan is traced. Spans are the core's, 24 bytes each (see `tercet_shared.telemetry.tracing.packed`)."""

    slots: I32  # [t] those of the plan's new slots whose request is traced
    spans: bytes  # [t * 24] under which the worker's span of each goes
    step: bytes = b""  # [24] under which the worker's span of the step goes, or empty: the step is not traced


@dataclass(slots=True)
class GrammarMask:
    """Which tokens the gated rows of one step may draw: G rows in the order of `StepPlan.gated`."""

    step_id: int
    words: U32  # [G * ceil(vocabulary / 32)] bit i % 32 of word i // 32 of a row: token i may be drawn


@dataclass(slots=True)
class LogProbColumns:
    """Log-probabilities (natural logarithm, of the raw logits) of runs of tokens: l rows of a step, t tokens in all.

    Alternatives are ordered by log-probability, then by id; there are as many as the slot asked for.
    """

    rows: I32  # [l] rows of the plan, ascending
    first: I32  # [l] where in prompt + output the row's first token here stands
    token_offsets: I32  # [l + 1]
    logprobs: F32  # [t] of the tokens themselves
    ranks: I32  # [t] 1: the most likely token
    top_offsets: I32  # [t + 1]
    top_ids: I32
    top_logprobs: F32

    @classmethod
    def empty(cls) -> LogProbColumns:
        """Returns columns without rows."""
        none, floats, zero = empty_i32(), np.zeros(0, np.float32), np.zeros(1, np.int32)
        return cls(none, none, zero, floats, none, zero, none, floats)


@dataclass(slots=True)
class StepResult:
    """What a step yielded, rows in the order of its plan."""

    step_id: int
    token_offsets: I32  # [S + 1] into token_ids; a row that did not sample has none
    token_ids: I32  # accepted tokens
    not_finite: I32 = field(default_factory=empty_i32)  # rows whose raw logits held NaN or infinity; they have no token
    wait_us: int = 0  # from the plan's arrival to its start
    run_us: int = 0  # from its start to its tokens being on the host
    logprobs: LogProbColumns | None = None  # of the tokens in token_ids, for rows whose slot asked for them
    prompt_logprobs: LogProbColumns | None = None  # of prompt tokens: those that follow the computed ones
    pooled_rows: I32 = field(default_factory=empty_i32)  # [p] pooling rows whose prompt is computed; they have no token
    pooled: F32 = field(default_factory=lambda: np.zeros(0, np.float32))  # [p * hidden size]
    error: str = ""  # the step failed as a whole; then all rows are without tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """What a worker offers. Sent once, when it connects.

    A worker is one process or a group of them, its ranks. Each rank joins by itself, all of them offer the same limits,
    and every plan reaches every rank; one of them answers.

    Attributes:
        protocol: `PROTOCOL_VERSION` of the worker.
        incarnation: differs for every start of the worker and every time its KV cache was dropped.
        model_name: the name under which the model is served unless told otherwise.
        model_fingerprint: of the weights and configuration; keys of KV blocks derive from it.
        tokenizer_fingerprint: of the tokenizer that belongs to the weights.
        vocab_size: rows of the output head that are real tokens.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool.
        max_slots: requests that may hold state at once.
        max_model_len: tokens of prompt and output that one request may have.
        max_batched_tokens: tokens that one step may have.
        dtype: of weights and KV cache, for people.
        device: for people.
        pid: of the process that a supervisor has started and may end: the worker itself, or what started the ranks of a
            group on its host. It means nothing across PID namespaces.
        group: the same for all ranks of one start of a group, and for nobody else; empty for a single worker.
        rank: this process among the group's, from 0.
        ranks: processes of the group; 1: there is no group.
        stages: pipeline stages that the layers are split into, each of ``ranks / stages`` ranks.
        answers: whether this rank sends the results.
    """

    protocol: int
    incarnation: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_slots: int
    max_model_len: int
    max_batched_tokens: int
    dtype: str
    device: str
    pid: int
    group: str = ""
    rank: int = 0
    ranks: int = 1
    stages: int = 1
    answers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreWelcome:
    """The core's answer to a worker: the limits it will keep to (each at most what the worker offered)."""

    protocol: int
    core_id: str
    max_slots: int
    max_model_len: int
    max_batched_tokens: int
    pipeline_depth: int


def _no_new_slots() -> NewSlots:
    none = NewSlots.empty()
    for column in fields(none):
        getattr(none, column.name).flags.writeable = False
    return none


NO_NEW_SLOTS = _no_new_slots()
"""Columns without rows, which nobody can write to: plans that start nothing share them, as making them takes long."""
