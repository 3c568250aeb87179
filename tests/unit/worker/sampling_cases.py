"""Rows to sample, what the sampler draws for them, and what the contract says it must draw: one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.step import NewSlot, NewSlots, Slot
from tercet_worker.sampling import Sampled, Sampler, SamplerParts, SamplingTable
from tercet_worker.sampling.noise import RowKeys, gumbel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One row to sample. Its text is ``text`` where that is given, else ``position`` zeros."""

    params: SamplingParams
    prompt_len: int = 4
    position: int = 9
    text: tuple[int, ...] = ()
    grammar: frozenset[int] | None = None  # tokens that may be drawn; None: not gated

    @property
    def tokens(self) -> list[int]:
        return list(self.text) or [0] * self.position


def draw(
    logits: npt.NDArray[np.float32],
    rows: list[Row],
    *,
    first_candidates: int | None = None,
    parts: SamplerParts | None = None,
) -> list[int]:
    """Returns what the sampler draws for ``logits [R, V]``."""
    return sample(logits, rows, first_candidates=first_candidates, parts=parts).token_ids.tolist()


def pack(masks: list[frozenset[int]], vocab_size: int) -> npt.NDArray[np.uint32]:
    """Returns the words of a grammar mask, row after row."""
    words = np.zeros((len(masks), -(-vocab_size // 32)), np.uint32)
    for row, mask in enumerate(masks):
        for token in mask:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    return words.reshape(-1)


def fill(rows: list[Row], slots: npt.NDArray[np.int64]) -> SamplingTable:
    """Returns a table that holds each row in its slot, with its text, and other things in other slots."""
    longest = max([16, *(len(row.tokens) + 1 for row in rows if row.text)])
    tokens = torch.full((int(slots.max()) + 1, longest), 3, dtype=torch.int32)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if row.text:
            tokens[slot, : len(row.text)] = torch.tensor(row.text, dtype=torch.int32)
        else:
            tokens[slot] = 0
    table = SamplingTable(tokens)
    noise = SamplingParams(
        logit_bias=((1, -50.0),), allowed_token_ids=(0, 1), bad_words=((2,), (0, 0, 1)), frequency_penalty=2.0
    )
    others = [
        NewSlot(Slot(int(slot)), 0, 1, np.zeros(1, np.int32), noise) for slot in range(int(slots.max()) + 1)
    ]  # what a slot held before must not matter
    table.put(NewSlots.build(others))
    table.put(
        NewSlots.build(
            [
                NewSlot(Slot(slot), 1, row.prompt_len, np.zeros(row.prompt_len, np.int32), row.params)
                for slot, row in zip(slots.tolist(), rows, strict=True)
            ]
        )
    )
    return table


def sample(
    logits: npt.NDArray[np.float32],
    rows: list[Row],
    *,
    first_candidates: int | None = None,
    parts: SamplerParts | None = None,
) -> Sampled:
    """Runs the sampler on a copy of ``logits``, each row in a slot of its own: first those without a grammar."""
    slots = np.arange(len(rows))[::-1].copy() + 2
    table = fill(rows, slots)
    sampler = Sampler(logits.shape[1], CPU, parts=parts)
    if first_candidates is not None:
        sampler._first_candidates = first_candidates
    tokens, finite = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.bool)
    positions = np.array([len(row.text) or row.position for row in rows], np.int32)
    for gated in (False, True):
        index = np.array([number for number, row in enumerate(rows) if (row.grammar is not None) is gated], np.int64)
        if not len(index):
            continue
        words = pack([rows[number].grammar or frozenset() for number in index.tolist()], logits.shape[1])
        batch = table.batch(slots[index], positions[index], gated=gated)
        drawn = sampler(torch.from_numpy(logits[index]), batch, (lambda words=words: words) if gated else None)
        tokens[index], finite[index] = drawn.token_ids, drawn.finite
    return Sampled(tokens, finite)


def reference(logits: npt.NDArray[np.float32], row: Row) -> int:
    """The order of the contract, spelled out for one row."""
    params, text = row.params, row.tokens
    values = processed(logits, row)
    if params.temperature == 0:
        return int(np.argmax(values))
    values = values / params.temperature
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    kept = order[: params.top_k] if params.top_k else order
    weights = np.exp(values[kept] - values[kept[0]])
    probabilities = weights / weights.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        kept = [token for token, reached in zip(kept, before, strict=True) if reached < np.float32(params.top_p)]
    best = values[kept[0]]
    floor = np.log(params.min_p) if params.min_p else -np.inf
    kept = [token for token in kept if values[token] - best >= floor]
    halves = torch.from_numpy(np.array([params.seed], np.uint64).view(np.int32).copy())
    keys = RowKeys.of(halves[:1], halves[1:], torch.tensor([len(text)], dtype=torch.int32))
    noise = gumbel(keys, torch.tensor(sorted(kept), dtype=torch.int32))[0].numpy()
    return sorted(kept)[int(np.argmax(values[sorted(kept)] + noise))]


def processed(logits: npt.NDArray[np.float32], row: Row) -> npt.NDArray[np.float64]:
    """Returns the logits of one row before temperature; -inf where a token may not be drawn."""
    params, text = row.params, row.tokens
    output = text[row.prompt_len :]
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in set(text):
        factor = float(np.float32(params.repetition_penalty))
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    everything = set(range(len(values)))
    stops = set(params.eos_token_ids + params.stop_token_ids)
    bad = {word[-1] for word in params.bad_words if not word[:-1] or tuple(text[1 - len(word) :]) == word[:-1]}
    kept = everything
    for wanted in (
        everything if row.grammar is None else row.grammar,
        set(params.allowed_token_ids) or everything,
        everything - bad,
        everything - stops if len(text) < row.prompt_len + params.min_tokens else everything,
    ):
        kept = kept & wanted or kept
    values[list(everything - kept)] = -np.inf
    return values
