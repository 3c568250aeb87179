"""What comes beside tokens, for those who ask: log-probabilities, vectors, what was cached; and grammars."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tercet_frontend.cores.interface import Finished, FinishReason, Start, TokenLogProbs, Tokens
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import InternalError, InvalidRequestError
from tercet_shared.pooling import Pooling
from tercet_shared.structured import Grammar, GrammarKind
from tests.fakes.core import STOP, FakeCore, logprobs_message, scored, step_frame
from tests.integration.frontend_cores.support import open_cores, request

if TYPE_CHECKING:
    from tercet_frontend.cores import StaticCores

ENDED = Finished(FinishReason.STOP, None, 0)


async def test_a_submit_carries_what_few_ask_for(core: FakeCore, cores: StaticCores) -> None:
    plain = request(1)
    cores.submit(plain)
    full_request = request(
        1, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logprobs=0, prompt_logprobs=3,
        logit_bias=((7, -100.0), (8, 1.5)), allowed_token_ids=(5, 6), bad_words=((1, 2), (3,)),
    )  # fmt: skip
    grammar = Grammar(GrammarKind.REGEX, "a+", "guided_regex")
    cores.submit(replace(full_request, grammar=grammar, queue_timeout=2.5, priority=-3, tenant="t", cache_salt="t/s"))
    cores.submit(replace(plain, pooling=Pooling.MEAN))
    default, full, pooled = [received.submit for received in await core.next_requests(3)]
    assert not default.HasField("grammar")
    assert not any(default.sampling.HasField(name) for name in ("repetition_penalty", "logprobs", "prompt_logprobs"))
    assert (default.queue_deadline_s, default.pooling) == (0.0, pb.POOLING_NONE)
    sampling = full.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (list(sampling.bias_ids), list(sampling.bias_values)) == ([7, 8], [-100.0, 1.5])
    assert list(sampling.allowed_token_ids) == [5, 6]
    assert [list(word.ids) for word in sampling.bad_words] == [[1, 2], [3]]
    assert sampling.HasField("logprobs")
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 3)
    assert (full.grammar.kind, full.grammar.text, full.grammar.param) == (pb.GRAMMAR_KIND_REGEX, "a+", "guided_regex")
    assert (full.queue_deadline_s, full.priority, full.tenant, full.cache_salt) == (2.5, -3, "t", "t/s")
    assert pooled.pooling == pb.POOLING_MEAN


async def test_log_probabilities_stay_with_their_tokens(core: FakeCore, cores: StaticCores) -> None:
    first, second, plain = cores.submit(request(1, logprobs=2)), cores.submit(request(2, logprobs=0)), cores.submit(
        request(3)
    )  # fmt: skip
    a, b, c = await core.next_requests(3)
    core.step([
        a.row(5, 6, scores=[scored(0, 5, 2), scored(1, 6, 2)]), c.row(7), b.row(8, scores=[scored(0, 8, 0)]),
    ])  # fmt: skip
    core.step([b.row(9, scores=[scored(1, 9, 0)], finish=STOP), a.row(finish=STOP), c.row(finish=STOP)])
    expected = {first: [(0, 5, 2), (1, 6, 2)], second: [(0, 8, 0), (1, 9, 0)]}
    for generation, tokens in expected.items():
        ids: list[int] = []
        logprobs: list[TokenLogProbs] = []
        while True:
            batch = await generation.next()
            ids += batch.ids
            assert batch.logprobs is not None
            logprobs += batch.logprobs
            if batch.finished is not None:
                break
        assert ids == [token for _, token, _ in tokens]
        assert logprobs == [
            TokenLogProbs(logprob, rank, [top for top, _ in tops], [value for _, value in tops])
            for logprob, rank, tops in (scored(*token) for token in tokens)
        ]
    assert (await plain.next()).logprobs is None


async def test_missing_log_probabilities_are_an_error(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request(1, logprobs=2))
    received = await core.next_request()
    received.send(5)
    with pytest.raises(InternalError, match="log-probabilities"):
        await generation.next()
    await core.wait_for(lambda: received.aborted)


async def test_cached_tokens_are_known_with_the_first_token(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request())
    received = await core.next_request()
    received.send(5, starts=16)
    assert (await generation.next()).start == Start(16, None)
    received.send(6, starts=99)  # of a later attempt, say: what it found there, the first one computed
    received.send(7, finish=STOP, cached=16)
    assert (await generation.next()).start is None


async def test_log_probabilities_of_the_prompt(core: FakeCore, cores: StaticCores) -> None:
    prompt = range(100, 110)
    generation = cores.submit(request(*prompt, prompt_logprobs=3))
    received = await core.next_request()
    received.send_prompt_scores(1, 4)
    received.send_prompt_scores(1, 2)  # again, as after a preemption
    received.send_prompt_scores(3, 5)
    frame = step_frame([received.row(5, starts=0)])
    frame.prompt_logprobs.append(received.prompt_scores(8, 2))  # in the frame of the first token
    core.connections[0].send(frame)
    start = (await generation.next()).start
    assert start is not None
    assert start.prompt_logprobs == [
        TokenLogProbs(logprob, rank, [top for top, _ in tops], [value for _, value in tops])
        for logprob, rank, tops in (scored(position, prompt[position], 3) for position in range(1, 10))
    ]


async def test_log_probabilities_of_a_prompt_that_did_not_ask(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request(1, 2, 3))
    received = await core.next_request()
    received.send_prompt_scores(1, 2)
    received.send(5, starts=3)
    assert await generation.next() == Tokens([5], None, None, Start(3, None))


@pytest.mark.parametrize(("first", "count"), [(2, 1), (1, 3), (0, 1)])
async def test_log_probabilities_that_do_not_fit_the_prompt(
    core: FakeCore, cores: StaticCores, first: int, count: int
) -> None:
    generation = cores.submit(request(1, 2, 3, prompt_logprobs=0))
    received = await core.next_request()
    scores = logprobs_message([scored(0, 0, 0)] * count)
    run = pb.PromptLogProbs(handle=received.handle, first=first, logprobs=scores)
    core.connections[0].send(pb.EngineFrame(prompt_logprobs=[run]))
    again = await core.next_request()  # on a new stream
    again.send_prompt_scores(1, 2)
    again.send(5, starts=0, finish=STOP)
    start = (await generation.next()).start
    assert len((start and start.prompt_logprobs) or ()) == 2


async def test_another_attempt_goes_on_where_the_first_ended(core: FakeCore, cores: StaticCores) -> None:
    generation = cores.submit(request(1, 2, 3, 4, logprobs=1, prompt_logprobs=0))
    received = await core.next_request()
    received.send_prompt_scores(1, 3)
    received.send(5, starts=2, scores=[scored(0, 5, 1)])
    first = await generation.next()
    assert first.start is not None
    generation.attempt = received.submit.attempt = 1  # as a resubmission does: it reads the prompt again
    stale = received.row(9, scores=[scored(9, 9, 1)])
    stale.attempt = 0
    received.send_prompt_scores(1, 3)
    core.step([stale])
    received.send(6, starts=4, scores=[scored(1, 6, 1)], finish=STOP)
    second = await generation.next()
    assert first.start.cached_tokens == 2
    assert len(first.start.prompt_logprobs or ()) == 3
    assert (second.ids, second.start) == ([6], None)
    assert [found.top_ids for found in generation.logprobs or ()] == [[6], [7]]


async def test_a_vector(core: FakeCore, cores: StaticCores) -> None:
    first, second, text = (cores.submit(request(n)) for n in range(3))
    a, b, c = await core.next_requests(3)
    core.step([
        a.row(finish=STOP, pooled=[0.5, -1.5, 2.0]), c.row(7), b.row(finish=STOP, pooled=[0.0, 1.0, -1.0])
    ])  # fmt: skip
    for generation, expected in ((first, [0.5, -1.5, 2.0]), (second, [0.0, 1.0, -1.0])):
        tokens = await generation.next()
        assert (tokens.ids, tokens.finished) == ([], ENDED)
        assert tokens.pooled is not None
        assert (tokens.pooled.tolist(), tokens.pooled.dtype) == (expected, np.float32)
    assert (await text.next()).pooled is None


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": np.array([3], "<i4").tobytes()},
        {"rows": b""},
        {"token_logprobs": b"123"},
        {"token_logprobs": b""},
        {"token_ranks": b""},
        {"top_offsets": np.array([0, 2, 1], "<i4").tobytes()},
        {"top_offsets": np.array([0, 2, 5], "<i4").tobytes()},
        {"top_ids": b""},
    ],
)
async def test_malformed_log_probabilities_end_the_stream(
    core: FakeCore, cores: StaticCores, damage: dict[str, bytes]
) -> None:
    generation = cores.submit(request(logprobs=2))
    received = await core.next_request()
    frame = step_frame([received.row(1, 2, scores=[scored(0, 1, 2), scored(1, 2, 2)])])
    for name, value in damage.items():
        setattr(frame.step.logprobs, name, value)
    core.connections[0].send(frame)
    again = await core.next_request()  # on a new stream
    assert again.connection is core.connections[1]
    again.send(finish=STOP)
    tokens = await generation.next()
    assert len(tokens.ids) == len(tokens.logprobs or ())


async def test_the_playing_core_scores_pools_and_refuses() -> None:
    async with (
        FakeCore(
            outputs=lambda _: [5, 6], cached=32, pooled=[1.0, 2.0], unsound=lambda grammar: f"No {grammar.text}."
        ) as player,
        open_cores(player.address) as cores,
    ):
        await cores.wait_until_ready()
        generation = cores.submit(request(*range(1, 10), logprobs=1, prompt_logprobs=0))
        tokens = await generation.next()
        assert tokens.start is not None
        assert tokens.start.cached_tokens == 32
        assert len(tokens.start.prompt_logprobs or ()) == 8
        vector = (await cores.submit(replace(request(), pooling=Pooling.LAST)).next()).pooled
        assert vector is not None
        assert vector.tolist() == [1.0, 2.0]
        refused = cores.submit(replace(request(), grammar=Grammar(GrammarKind.LARK, "x", "guided_grammar")))
        with pytest.raises(InvalidRequestError, match="No x") as caught:
            await refused.next()
        assert caught.value.param == "guided_grammar"
