"""Prompts: lengths, shared beginnings, files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tercet_shared.errors import ConfigurationError
from tercet_tools.bench.prompts import WORDS, RandomIds, RandomWords, Recorded, read_dataset
from tercet_tools.bench.settings import Span

SPAN = Span(64, 96)


def test_words_are_many_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100


def test_random_ids_have_the_lengths_and_the_prefix() -> None:
    prompts = RandomIds(
        vocabulary=Span(5, 9), input_tokens=SPAN, output_tokens=Span(2, 4), shared_prefix=60, prefix_seed=3
    )
    found = list(itertools.islice(prompts.questions(1), 300))
    ids = [question.fields["prompt"] for question in found]
    assert {len(prompt) for prompt in ids} == set(range(64, 97))
    assert {question.output_tokens for question in found} == {2, 3, 4}
    assert len({tuple(prompt[:60]) for prompt in ids}) == 1
    assert set(itertools.chain(*ids)) == {5, 6, 7, 8, 9}
    other = next(iter(prompts.questions(2))).fields["prompt"]
    assert other[:60] == ids[0][:60]


def test_random_words_make_the_tokens_that_the_server_counts() -> None:
    prompts = RandomWords(
        input_tokens=SPAN, output_tokens=Span(1, 1), shared_prefix=40, prefix_seed=3, overhead=10.0, per_word=1.5
    )
    texts = [
        question.fields["messages"][0]["content"].split() for question in itertools.islice(prompts.questions(1), 50)
    ]
    counts = [10 + 1.5 * len(text) for text in texts]
    assert all(63 <= count <= 97 for count in counts)
    assert len({tuple(text[:20]) for text in texts}) == 1  # (40 - 10) / 1.5 words
    assert len({tuple(text) for text in texts}) == 50


def test_a_dataset_is_asked_whole_before_it_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"p{index}", "max_tokens": index} for index in range(5)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    lines = read_dataset(path, chat=False)
    prompts = Recorded(lines=lines, output_tokens=Span(9, 9))
    found = list(itertools.islice(prompts.questions(1), 10))
    assert (
        {q.fields["prompt"] for q in found[:5]}
        == {q.fields["prompt"] for q in found[5:]}
        == {f"p{i}" for i in range(5)}
    )
    assert {q.fields["prompt"]: q.output_tokens for q in found} == {"p0": 9, "p1": 1, "p2": 2, "p3": 3, "p4": 4}
    assert found == list(itertools.islice(prompts.questions(1), 10))


def test_prompts_become_messages_for_chats(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "hi"}\n{"messages": [{"role": "user", "content": "ho"}]}\n')
    contents = [line.fields["messages"][0]["content"] for line in read_dataset(path, chat=True)]
    assert contents == ["hi", "ho"]


@pytest.mark.parametrize(
    ("text", "chat", "said"),
    [
        ("{", False, r"x\.jsonl:1: not JSON"),
        ("[]", False, ":1: not a JSON object"),
        ('{"prompt": "a"}\n{}', False, ":2: there is neither"),
        ('{"prompt": ["a"]}', False, "neither"),
        ('{"prompt": [1, 2]}', True, "--endpoint completions"),
        ('{"messages": [{}]}', False, "--endpoint chat"),
        ('{"prompt": "a", "max_tokens": -1}', False, "max_tokens"),
        ("\n", False, "empty"),
    ],
)
def test_what_is_wrong_in_a_dataset_is_named(text: str, chat: bool, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_dataset(path, chat=chat)


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_dataset(tmp_path / "none", chat=True)
