"""What a step yields beside plain tokens, on a tiny model: log-probabilities, gated rows, appended tokens, vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModel

from tercet_shared.errors import InternalError, ProtocolError
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import SamplingParams
from tercet_shared.wire.frames import decode_result, encode_result
from tercet_shared.wire.step import LogProbColumns, StepResult
from tercet_worker import runner as runner_module
from tercet_worker.startup import Engine
from tests.fakes.checkpoints import write_tiny_llama
from tests.integration.worker.driver import Driver, Request, engine_for
from tests.integration.worker.logits import prompt_logits

V = 384
PROMPTS = [np.random.default_rng(length).integers(3, V, length).tolist() for length in (37, 1, 20, 64, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return engine_for(model, "--dtype=float32", "--num-kv-blocks=64", "--max-num-seqs=8", "--threads=2")


@pytest.fixture
def driver(engine: Engine) -> Iterator[Driver]:
    engine.runner.reset()
    yield Driver(engine.runner)
    engine.runner.reset()


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=100, **params)  # type: ignore[arg-type]  # names are checked there


def whole(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities ``[len(tokens), V]`` of what follows each token, from one forward pass."""
    return torch.log_softmax(prompt_logits(engine, tokens).to(torch.float64), dim=1)


def check_token(columns: LogProbColumns, index: int, line: torch.Tensor, token: int, alternatives: int) -> None:
    """Compares one token of ``columns`` with its log-probabilities ``[V]``."""
    assert columns.logprobs[index] == pytest.approx(float(line[token]), abs=1e-5)
    assert columns.ranks[index] == int((line > line[token]).sum()) + 1
    part = slice(columns.top_offsets[index], columns.top_offsets[index + 1])
    best = line.topk(alternatives)
    assert columns.top_ids[part].tolist() == best.indices.tolist()
    np.testing.assert_allclose(columns.top_logprobs[part], best.values.numpy(), atol=1e-5)


def over_the_wire(result: StepResult) -> StepResult:
    return decode_result(encode_result(result))


def test_log_probabilities_of_drawn_tokens_are_of_raw_logits(engine: Engine, driver: Driver) -> None:
    asking = [
        greedy(logprobs=3, logit_bias=((5, 100.0),), min_tokens=50, stop_token_ids=(7, 8)),
        SamplingParams(temperature=1.5, seed=4, logprobs=0, max_tokens=100, top_p=0.9, frequency_penalty=1.0),
        greedy(),
        SamplingParams(temperature=5.0, seed=9, logprobs=20, max_tokens=100, allowed_token_ids=tuple(range(9, 300))),
    ]
    requests = [driver.start(slot, PROMPTS[slot], params) for slot, params in enumerate(asking)]
    kept: list[tuple[Request, LogProbColumns, int]] = []
    while any(len(request.output) < 5 for request in requests):
        # The longest prompt comes in two pieces, and the rows in changing order.
        order = requests if len(requests[0].output) % 2 else requests[::-1]
        plan_slots = [request.slot for request in order]
        result = over_the_wire(driver.step({request.slot: min(request.need, 40) for request in order}))
        if result.logprobs is None:
            continue
        assert result.prompt_logprobs is None
        assert (np.diff(result.logprobs.rows) > 0).all()
        for number, row in enumerate(result.logprobs.rows.tolist()):
            request = requests[plan_slots[row]]
            assert result.logprobs.first[number] == len(request.tokens) - 1
            assert result.logprobs.token_offsets[number + 1] == number + 1
            kept.append((request, result.logprobs, number))
    counts = [sum(1 for request, _, _ in kept if request.slot == slot) for slot in range(4)]
    assert counts[2] == 0
    assert min(counts[0], counts[1], counts[3]) >= 5
    lines = [whole(engine, request.tokens) for request in requests]
    for request, columns, number in kept:
        place = int(columns.first[number])
        line = lines[request.slot][place - 1]
        check_token(columns, number, line, request.tokens[place], max(request.params.logprobs, 0))


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
@pytest.mark.parametrize("alternatives", [0, 4])
def test_log_probabilities_of_prompts_however_they_are_cut(
    engine: Engine, driver: Driver, monkeypatch: pytest.MonkeyPatch, budget: int, alternatives: int
) -> None:
    monkeypatch.setattr(runner_module, "_PIECE", 5 * V)  # five tokens at once
    params = [
        greedy(prompt_logprobs=alternatives, logprobs=1),
        greedy(prompt_logprobs=alternatives),  # one token, which has none before it
        greedy(),
        greedy(prompt_logprobs=20),
        greedy(prompt_logprobs=alternatives),
    ]
    requests = [driver.start(slot, PROMPTS[slot], choice) for slot, choice in enumerate(params)]
    found: dict[int, list[tuple[LogProbColumns, int]]] = {slot: [] for slot in range(5)}
    places: dict[int, list[int]] = {slot: [] for slot in range(5)}
    while any(len(request.output) < 2 for request in requests):
        counts, left = {}, budget
        for request in requests:
            count = min(request.need, left) if len(request.output) < 2 else 0
            if count:
                counts[request.slot], left = count, left - count
        plan, pending = driver.submit(counts)
        result = over_the_wire(pending.result())
        driver.land(plan, result)
        columns = result.prompt_logprobs
        if columns is None:
            continue
        for number, row in enumerate(columns.rows.tolist()):
            slot = int(plan.slots[row])
            assert columns.first[number] == plan.computed[row] + 1
            for index in range(columns.token_offsets[number], columns.token_offsets[number + 1]):
                found[slot].append((columns, index))
                places[slot].append(int(columns.first[number]) + index - int(columns.token_offsets[number]))
    for slot, request in enumerate(requests):
        expected = list(range(1, len(PROMPTS[slot]))) if params[slot].prompt_logprobs >= 0 else []
        assert places[slot] == expected
        lines = whole(engine, PROMPTS[slot])
        for place, (columns, index) in zip(places[slot], found[slot], strict=True):
            check_token(columns, index, lines[place - 1], request.tokens[place], params[slot].prompt_logprobs)


def words(*rows: set[int]) -> np.ndarray:
    out = np.zeros((len(rows), V // 32), np.uint32)
    for row, mask in zip(out, rows, strict=True):
        for token in mask:
            row[token // 32] |= np.uint32(1 << token % 32)
    return out.reshape(-1)


def test_gated_rows_draw_under_their_masks_and_the_others_as_ever(driver: Driver) -> None:
    params = [greedy(logprobs=2), SamplingParams(temperature=1.0, seed=3, max_tokens=99), greedy(), greedy(logprobs=1)]
    alone = []
    for choice, prompt in zip(params, PROMPTS[:4], strict=True):
        request = driver.start(0, prompt, choice)
        driver.run(512, 1)
        alone.append(request.output)
        driver.finish(request)
    requests = [driver.start(slot, PROMPTS[slot], choice) for slot, choice in enumerate(params)]
    # In the batch, the prompt of one token comes first: rows of the mask follow the plan, not the batch.
    mask = words({11, 200}, {33}, {383})
    counts = {slot: requests[slot].need for slot in (3, 1, 2, 0)}
    result = over_the_wire(driver.step(counts, gated=(0, 1, 3), grammar=lambda: mask))
    assert requests[3].output[0] in {11, 200}
    assert requests[1].output == [33]
    assert requests[2].output == alone[2]
    assert requests[0].output == [383]
    assert result.logprobs is not None
    assert result.logprobs.rows.tolist() == [0, 3]
    # The tokens are where the next step finds them.
    again = [driver.start(4 + slot, [*PROMPTS[slot], *requests[slot].output]) for slot in (0, 3)]
    driver.run(512, 1)
    driver.run(512, 2)
    assert [request.output[0] for request in again] == [requests[0].output[1], requests[3].output[1]]


def test_a_step_in_which_all_rows_are_gated(driver: Driver) -> None:
    requests = [driver.start(slot, PROMPTS[slot]) for slot in (0, 2)]
    driver.step({0: 37, 2: 20}, gated=(0, 2), grammar=lambda: words({5}, {6}))
    assert [request.output for request in requests] == [[5], [6]]


def test_the_mask_is_asked_for_when_all_else_is_done(driver: Driver) -> None:
    free, gated = driver.start(0, PROMPTS[0]), driver.start(1, PROMPTS[2], greedy(prompt_logprobs=0))
    state = driver.runner._state

    def mask() -> np.ndarray:
        # The free row's token is in the buffer: it was drawn without waiting.
        seen.append(int(state.tokens[0, 37]))
        return words({9})

    seen: list[int] = []
    driver.step({0: 37, 1: 20}, gated=(1,), grammar=mask)
    assert seen == free.output
    assert gated.output == [9]


def test_a_gated_step_without_a_source_of_masks_is_refused_and_changes_nothing(driver: Driver) -> None:
    driver.start(0, PROMPTS[0])
    with pytest.raises(InternalError, match="no source of masks"):
        driver.submit({0: 37}, gated=(0,))
    assert not driver.runner._state.occupied[0]


def test_appended_tokens_are_as_if_they_had_been_drawn(driver: Driver) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=99, frequency_penalty=2.0, repetition_penalty=1.2)
    prompt, forced = PROMPTS[0], [17, 17, 250, 4]
    first = driver.start(0, prompt, params)
    other = driver.start(1, PROMPTS[2], greedy())
    driver.run(512, 1)
    # The token in flight was drawn; the forced ones follow it, beside a row that has none.
    driver.step({1: 1, 0: 1 + len(forced)}, appended={0: forced})
    driver.run(512, 9)
    assert first.output[1:5] == forced
    assert len(other.output) == 9
    # A request that resumes with the same tokens goes on in the same way.
    resumed = Request(2, prompt + first.output[:5], len(prompt), params, len(prompt) + 5)
    driver.requests[2] = resumed
    driver.run(512, 9)
    assert resumed.output == first.output
    # Without the forced tokens it would have been another text.
    plain = driver.start(3, prompt, params)
    driver.run(512, 9)
    assert plain.output[:1] == first.output[:1]
    assert plain.output != first.output


def test_appended_tokens_may_be_computed_in_pieces(driver: Driver) -> None:
    forced = list(range(40, 60))
    request = driver.start(0, PROMPTS[0])
    driver.run(512, 1)
    driver.step({0: 8}, appended={0: forced})
    assert request.output[1:] == forced
    driver.step({0: 13})
    again = driver.start(1, PROMPTS[0] + request.output[:-1])
    driver.run(512, 1)
    assert again.output == request.output[-1:]


@torch.inference_mode()
@pytest.mark.parametrize("budget", [1, 9, 512])
@pytest.mark.parametrize("kind", [Pooling.LAST, Pooling.MEAN])
def test_vectors_are_those_of_transformers_however_prompts_are_cut(
    model: Path, driver: Driver, kind: Pooling, budget: int
) -> None:
    transformers.utils.logging.disable_progress_bar()
    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    requests = [driver.start(slot, prompt, pooling=kind) for slot, prompt in enumerate(PROMPTS)]
    other = driver.start(6, PROMPTS[2])
    driver.run(budget, 3)
    assert len(other.output) == 3
    for request in requests:
        states = reference(torch.tensor([request.tokens])).last_hidden_state[0]
        exact = states[-1] if kind is Pooling.LAST else states.mean(dim=0)
        assert request.vector is not None
        torch.testing.assert_close(torch.from_numpy(request.vector.copy()), exact, atol=2e-4, rtol=1e-4)
        assert request.tokens == PROMPTS[request.slot], "a vector is no token"


def test_a_mean_begins_again_after_preemption_and_in_the_next_request(driver: Driver) -> None:
    first = driver.start(0, PROMPTS[0], pooling=Pooling.MEAN)
    driver.run(512, 0)
    driver.finish(first)
    second = driver.start(0, PROMPTS[3], pooling=Pooling.MEAN)
    driver.step({0: 30})
    driver.preempt(second)
    driver.run(25, 0)
    third = driver.start(1, PROMPTS[3], pooling=Pooling.MEAN)
    driver.run(512, 0)
    assert second.vector is not None
    assert third.vector is not None
    np.testing.assert_allclose(second.vector, third.vector, atol=1e-5)


def test_a_mean_that_does_not_begin_with_the_first_token_is_refused(driver: Driver) -> None:
    first = driver.start(0, PROMPTS[0])
    driver.run(512, 1)
    driver.start(1, PROMPTS[0], shared=first.blocks[:1], pooling=Pooling.MEAN)
    with pytest.raises(ProtocolError, match="does not begin with the first"):
        driver.submit({1: 21})
    last = driver.start(2, PROMPTS[0], shared=first.blocks[:1], pooling=Pooling.LAST)
    driver.step({2: 21})
    assert last.vector is not None


def test_what_is_not_finite_is_left_out_and_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.start(0, PROMPTS[0], greedy(prompt_logprobs=1))
    driver.start(1, PROMPTS[2], greedy(prompt_logprobs=1, logprobs=2))
    for slot, kind in ((2, Pooling.LAST), (3, Pooling.MEAN), (4, Pooling.MEAN)):
        driver.start(slot, PROMPTS[2], pooling=kind)
    original = driver.runner._model.forward

    def poisoned(*arguments: object) -> torch.Tensor:
        hidden = original(*arguments)  # type: ignore[arg-type]
        hidden[3] = float("nan")  # the fourth token of the first row
        hidden[37 + 20 + 19] = float("inf")  # the last one of the third
        hidden[37 + 20 + 20 + 2] = float("nan")
        return hidden

    monkeypatch.setattr(driver.runner._model, "forward", poisoned)
    _, pending = driver.submit({0: 37, 1: 20, 2: 20, 3: 20, 4: 20})
    result = over_the_wire(pending.result())
    assert result.not_finite.tolist() == [0, 2, 3]
    assert result.token_offsets.tolist() == [0, 0, 1, 1, 1, 1]
    assert result.pooled_rows.tolist() == [4]
    assert np.isfinite(result.pooled).all()
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.rows.tolist() == [1]
    assert result.logprobs is not None
    assert result.logprobs.rows.tolist() == [1]
