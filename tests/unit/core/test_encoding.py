"""Between the scheduler's types and the messages of the stream."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_core.scheduling.logprobs import PromptRun, TokenLogProbs
from tercet_core.scheduling.outputs import Output, RowLogProbs, merged, prompt_output
from tercet_core.scheduling.request import FrontEnd
from tercet_core.streams.encoding import request_from, step_frames
from tercet_proto.v1 import engine_pb2 as pb
from tercet_shared.errors import InvalidRequestError
from tercet_shared.pooling import Pooling
from tercet_shared.sampling_params import OFF, SamplingParams
from tercet_shared.structured import Grammar, GrammarKind
from tercet_shared.wire.step import offsets_of
from tests.fakes.stream_client import LogProb, logprobs_in

PROMPT = np.array([5, 6, 7], "<i4").tobytes()


def taken(**submit: Any) -> Any:
    return request_from(pb.Submit(**({"prompt_ids": PROMPT} | submit)), FrontEnd(0), "model")


def test_every_sampling_parameter_arrives() -> None:
    sampling = pb.Sampling(
        temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**64 - 1, max_tokens=9, min_tokens=2,
        stop_token_ids=[4], eos_token_ids=[2, 3], presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25,
        bias_ids=[7, 8], bias_values=[-1.5, 100.0], allowed_token_ids=[1, 2], logprobs=0, prompt_logprobs=4,
        bad_words=[pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[3])],
    )  # fmt: skip
    params = taken(sampling=sampling).params
    assert params == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**64 - 1, max_tokens=9, min_tokens=2,
        stop_token_ids=(4,), eos_token_ids=(2, 3), presence_penalty=1.5, frequency_penalty=-0.5,
        repetition_penalty=1.25, logit_bias=((7, -1.5), (8, 100.0)), allowed_token_ids=(1, 2),
        bad_words=((1, 2), (3,)), logprobs=0, prompt_logprobs=4,
    )  # fmt: skip
    default = SamplingParams()
    same = [field.name for field in fields(params) if getattr(params, field.name) == getattr(default, field.name)]
    assert same == [], "each was set"


def test_absent_parameters_are_neutral() -> None:
    params = taken(sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=1)).params
    assert params.repetition_penalty == 1.0
    assert params.logprobs == params.prompt_logprobs == OFF
    assert params.logit_bias == params.allowed_token_ids == params.bad_words == ()


def test_grammars_and_pooling_arrive() -> None:
    for kind in GrammarKind:
        request = taken(grammar=pb.Grammar(kind=kind.value, text="text", param="guided"))
        assert request.grammar == Grammar(kind, "text", "guided")
    assert taken().grammar is None
    assert taken(grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="a")).grammar.param == "response_format"
    for pooling in Pooling:
        assert taken(pooling=pooling.value).pooling is pooling
    assert taken(pooling=pb.POOLING_LAST, sampling=pb.Sampling(temperature=-5.0)).params == SamplingParams()


@pytest.mark.parametrize(
    ("submit", "param"),
    [
        ({"prompt_ids": b"123"}, "prompt"),
        ({"sampling": pb.Sampling(bias_ids=[1])}, "logit_bias"),
        ({"grammar": pb.Grammar(text="a", param="p")}, "p"),
        ({"grammar": pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, param="p")}, "p"),
        ({"grammar": pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, text="a" * 262_145, param="p")}, "p"),
        ({"pooling": 9}, "pooling"),
    ],
)
def test_what_is_malformed_is_refused_by_name(submit: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        taken(**submit)
    assert caught.value.param == param


# ---------------------------------------------------------------------------------------------- steps


def values_of(tokens: list[int], alternatives: int) -> TokenLogProbs:
    """Returns log-probabilities that tell the tokens: -token, and ``alternatives`` more."""
    return TokenLogProbs(
        np.array([-token for token in tokens], np.float32),
        np.array(tokens, np.int32),
        offsets_of([alternatives] * len(tokens)),
        np.array([token + i for token in tokens for i in range(alternatives)], np.int32),
        np.array([-token - i for token in tokens for i in range(alternatives)], np.float32),
    )


def expected_of(token: int, alternatives: int) -> LogProb:
    return -float(token), token, [(token + i, float(-token - i)) for i in range(alternatives)]


def output_of(rows: list[tuple[int, list[int], bool, bool]], vector: bool = False) -> Output:
    """Returns an output of rows: handle, tokens, whether it asked for log-probabilities, whether it starts."""
    asked = [i for i, (_, tokens, asks, _) in enumerate(rows) if asks and tokens]
    starts = [i for i, (_, tokens, _, starts) in enumerate(rows) if starts and tokens]
    return Output(
        FrontEnd(3),
        np.array([handle for handle, _, _, _ in rows], np.uint64),
        np.zeros(len(rows), np.uint32),
        offsets_of([len(tokens) for _, tokens, _, _ in rows]),
        np.array([token for _, tokens, _, _ in rows for token in tokens], np.int32),
        start_rows=np.array(starts, np.int32),
        start_cached=np.array([100 + rows[i][0] for i in starts], np.int32),
        logprobs=RowLogProbs(
            np.array(asked, np.int32),
            values_of([token for i in asked for token in rows[i][1]], 1 + len(rows[asked[0]][1])),
        )
        if asked
        else None,
        pooled=[(i, np.array([handle, 1], np.float32)) for i, (handle, _, _, _) in enumerate(rows)] if vector else [],
    )


def heard(
    frames: list[pb.EngineFrame],
) -> tuple[dict[int, list[int]], dict[int, list[LogProb]], dict[int, int], list[Any]]:
    """Returns tokens, log-probabilities, cached tokens at the start and vectors, by handle."""
    tokens, logprobs = dict[int, list[int]](), dict[int, list[LogProb]]()
    starts, vectors = dict[int, int](), list[Any]()
    for frame in frames:
        step = frame.step
        handles = np.frombuffer(step.handles, "<u8").tolist()
        offsets = np.frombuffer(step.token_offsets, "<i4").tolist()
        ids = np.frombuffer(step.token_ids, "<i4").tolist()
        assert len(offsets) == len(handles) + 1
        for row, handle in enumerate(handles):
            tokens.setdefault(handle, []).extend(ids[offsets[row] : offsets[row + 1]])
        found = iter(logprobs_in(step.logprobs) if step.HasField("logprobs") else [])
        for row in np.frombuffer(step.logprobs.rows, "<i4").tolist():
            own = [next(found) for _ in range(offsets[row + 1] - offsets[row])]
            logprobs.setdefault(handles[row], []).extend(own)
        assert next(found, None) is None
        rows = np.frombuffer(step.start_rows, "<i4").tolist()
        for row, cached in zip(rows, np.frombuffer(step.start_cached, "<i4").tolist(), strict=True):
            assert handles[row] not in starts
            starts[handles[row]] = cached
        rows = np.frombuffer(step.pooled_rows, "<i4").tolist()
        flat = np.frombuffer(step.pooled, "<f4").reshape(len(rows), -1) if rows else []
        vectors += [(handles[row], vector.tolist()) for row, vector in zip(rows, flat, strict=True)]
    return tokens, logprobs, starts, vectors


@settings(max_examples=120, derandomize=True, database=None, deadline=None)
@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 5), st.lists(st.integers(1, 99), min_size=1, max_size=3), max_size=5),
        min_size=1,
        max_size=5,
    ),
    asking=st.sets(st.integers(0, 5)),
    max_bytes=st.sampled_from([1, 60, 150, 10_000]),
)
def test_merging_and_splitting_lose_nothing(
    steps: list[dict[int, list[int]]], asking: set[int], max_bytes: int
) -> None:
    started = set[int]()
    outputs, expected, alternatives = [], dict[int, list[int]](), dict[int, list[LogProb]]()
    for step in steps:
        rows = [(handle, ids, handle in asking, handle not in started) for handle, ids in step.items()]
        started |= set(step)
        outputs.append(output_of(rows))
        asked = [ids for handle, ids in step.items() if handle in asking]
        for handle, ids in step.items():
            expected.setdefault(handle, []).extend(ids)
            if handle in asking:
                own = [expected_of(token, 1 + len(asked[0])) for token in ids]
                alternatives.setdefault(handle, []).extend(own)
    tokens, logprobs, starts, _ = heard(step_frames(merged(outputs), max_bytes=max_bytes))
    assert tokens == expected
    assert logprobs == alternatives
    assert starts == {handle: 100 + handle for handle in expected}


def test_frames_keep_to_their_size_with_log_probabilities_and_vectors() -> None:
    rows = [(handle, [handle] * 50, True, True) for handle in range(40)]
    output = output_of(rows, vector=True)
    frames = step_frames(output, max_bytes=60_000)
    assert len(frames) > 5
    assert all(frame.ByteSize() < 61_000 for frame in frames)
    tokens, logprobs, _, vectors = heard(frames)
    assert {handle: len(own) for handle, own in logprobs.items()} == dict.fromkeys(range(40), 50)
    assert tokens == {handle: ids for handle, ids, _, _ in rows}
    assert vectors == [(handle, [handle, 1.0]) for handle in range(40)]


def test_what_is_about_prompts_comes_first_and_in_pieces() -> None:
    runs = [
        PromptRun(7, 1, 1, values_of(list(range(1, 501)), 20)),
        PromptRun(8, 0, 33, values_of([4], 0)),
    ]
    outputs = [
        prompt_output(FrontEnd(3), [runs[0]]),
        output_of([(7, [9], False, True)]),
        prompt_output(FrontEnd(3), [runs[1]]),
    ]
    frames = step_frames(merged(outputs), max_bytes=20_000)
    *about, last = frames
    assert last.HasField("step")
    assert not any(frame.HasField("step") for frame in about)
    assert all(frame.ByteSize() < 21_000 for frame in frames)
    found: dict[tuple[int, int], LogProb] = {}
    for frame in about:
        for part in frame.prompt_logprobs:
            assert part.attempt == (1 if part.handle == 7 else 0)
            found |= {(part.handle, part.first + i): own for i, own in enumerate(logprobs_in(part.logprobs))}
    assert found == {**{(7, i): expected_of(i, 20) for i in range(1, 501)}, (8, 33): expected_of(4, 0)}


def test_outputs_without_rows_make_no_step() -> None:
    nothing = prompt_output(FrontEnd(3), [])
    assert step_frames(merged([nothing, nothing]), max_bytes=100) == []
