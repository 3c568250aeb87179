from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tercet_shared.checkpoint import Checkpoint, GenerationDefaults
from tercet_shared.errors import CheckpointError
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path


def test_defaults_are_read(tmp_path: Path) -> None:
    stated = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "eos_token_id": [2, 5], "x": 1}
    checkpoint = Checkpoint.open(str(write_tiny_llama(tmp_path / "m", layers=1, generation_config=stated)))
    assert checkpoint.generation_defaults == GenerationDefaults(
        temperature=0.7, top_p=0.9, top_k=50, repetition_penalty=1.1, eos_token_ids=(2, 5)
    )
    assert checkpoint.eos_token_ids == (2, 5)


def test_without_a_file_there_are_none(tmp_path: Path, smollm2: Checkpoint) -> None:
    assert smollm2.generation_defaults == GenerationDefaults()
    checkpoint = Checkpoint.open(str(write_tiny_llama(tmp_path / "m", layers=1)))
    assert checkpoint.generation_defaults == GenerationDefaults()
    assert checkpoint.eos_token_ids == (2,)


def test_ends_are_the_union(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1, generation_config={"eos_token_id": 7})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [9, 7]}))
    assert Checkpoint.open(str(model)).eos_token_ids == (7, 9, 2)


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_nonsense_is_refused_by_name(stated: dict[str, Any], field: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_tiny_llama(tmp_path / "m", layers=1, generation_config=stated)))
    with pytest.raises(CheckpointError, match=f"generation_config.json: '{field}'"):
        _ = checkpoint.generation_defaults


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint(name: str, **options: Any) -> str:
        return Checkpoint.open(str(write_tiny_llama(tmp_path / name, layers=1, **options))).fingerprint

    first = fingerprint("a")
    assert len(first) == 32
    assert fingerprint("same") == first
    assert fingerprint("sharded", shards=3) == first
    others = [fingerprint("seed", seed=1), fingerprint("dtype", dtype="bfloat16"), fingerprint("config", max_len=99)]
    assert len({first, *others}) == 4
    files = [write_tiny_llama_gguf(tmp_path / f"{seed}.gguf", layers=1, seed=seed) for seed in range(2)]
    assert len({Checkpoint.open(str(file)).fingerprint for file in files}) == 2
