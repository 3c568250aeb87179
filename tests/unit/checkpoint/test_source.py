from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tercet_shared.checkpoint import Checkpoint, SourceKind, hub, resolve
from tercet_shared.errors import CheckpointError
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out_hub_cache(cache: Path, repo: str = "acme/tiny") -> Path:
    """Writes a model as the hub's cache keeps it: blobs apart, links in the snapshot."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    write_tiny_llama(snapshot, shards=2)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    blobs = root / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        blob = blobs / file.name
        shutil.move(file, blob)
        file.symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_directory_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path / "my-model")
    source = resolve(str(tmp_path / "my-model"))
    assert (source.kind, source.served_name) == (SourceKind.HUGGING_FACE, "my-model")
    monkeypatch.chdir(tmp_path / "my-model")
    assert resolve(".").served_name == "my-model"


def test_gguf_file_is_named_after_its_stem(smollm2_path: Path) -> None:
    source = resolve(str(smollm2_path))
    assert (source.kind, source.path, source.served_name) == (
        SourceKind.GGUF,
        smollm2_path,
        "SmolLM2-135M-Instruct.Q4_1",
    )


def test_directory_with_one_gguf_file(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "model" / "a.gguf")
    source = resolve(str(tmp_path / "model"))
    assert (source.kind, source.path.name, source.served_name) == (SourceKind.GGUF, "a.gguf", "model")
    write_tiny_llama_gguf(tmp_path / "model" / "b.gguf")
    with pytest.raises(CheckpointError, match="2 GGUF files; name the one"):
        resolve(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/no/such/model", "does not exist: there is no such file or directory"),
        ("./model", "does not exist: there is no such file or directory"),
        ("models/of/mine", "does not exist: there is no such file or directory"),
        ("model.gguf", "does not exist: there is no such file."),
        ("", "No model is named"),
        ("bad\0name", "No model is named"),
    ],
)
def test_missing_path_is_not_looked_up_on_the_hub(
    model: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        resolve(model)
    assert "hub" not in str(caught.value)


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resolve(str(tmp_path / "empty"))
    bare = write_tiny_llama(tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"safetensors but no config\.json"):
        resolve(str(bare))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        resolve(str(tmp_path / "notes.txt"))


def test_pickled_weights_are_refused_unopened(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "pickled")
    (model / "model.safetensors").unlink()
    # A FIFO would block whoever opens it.
    os.mkfifo(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickled weights, which are never read"):
        resolve(str(model))


def test_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama_gguf(tmp_path / "a-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match="one part of a split GGUF"):
        resolve(str(path))


def test_hub_id_from_the_cache(tmp_path: Path) -> None:
    snapshot = lay_out_hub_cache(tmp_path)
    checkpoint = Checkpoint.open("acme/tiny", cache_dir=tmp_path, offline=True)
    assert checkpoint.source.path == snapshot
    assert checkpoint.served_name == "acme/tiny"
    assert checkpoint.config.architecture == "LlamaForCausalLM"
    assert len(checkpoint.weights) == 20
    pinned = resolve("acme/tiny", revision=COMMIT, cache_dir=tmp_path, offline=True)
    assert pinned.path == snapshot


def test_hub_id_through_the_environment(tmp_path: Path) -> None:
    lay_out_hub_cache(tmp_path / "hub")
    code = "from tercet_shared.checkpoint import Checkpoint; print(Checkpoint.open('acme/tiny').config.hidden_size)"
    environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # our own interpreter
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "64"), done.stderr


@pytest.mark.parametrize(
    ("model", "revision", "sentence"),
    [
        ("acme/other", None, "not in the hub cache, and the hub cannot be reached"),
        ("acme/tiny", "v2", "not in the hub cache, and the hub cannot be reached"),
        ("acme/ti ny", None, "no valid hub id"),
        ("acme--/..x", None, "no valid hub id"),
    ],
)
def test_hub_failures_are_one_sentence(model: str, revision: str | None, sentence: str, tmp_path: Path) -> None:
    lay_out_hub_cache(tmp_path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        resolve(model, revision=revision, cache_dir=tmp_path, offline=True)
    assert "\n" not in str(caught.value)


def test_half_downloaded_snapshot_is_noticed(tmp_path: Path) -> None:
    snapshot = lay_out_hub_cache(tmp_path)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        _ = Checkpoint.open("acme/tiny", cache_dir=tmp_path, offline=True).weights


def test_the_text_of_a_model_needs_no_weights(tmp_path: Path) -> None:
    snapshot = lay_out_hub_cache(tmp_path)
    for path in [*snapshot.glob("*.safetensors"), snapshot / "model.safetensors.index.json"]:
        path.unlink()
    checkpoint = Checkpoint.open("acme/tiny", cache_dir=tmp_path, offline=True, text_only=True)
    assert checkpoint.tokenizer.fingerprint
    assert Checkpoint.open(str(snapshot), text_only=True).config.hidden_size == 64
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoint.open("acme/tiny", cache_dir=tmp_path, offline=True)


@pytest.mark.parametrize("text_only", [False, True])
def test_what_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_only: bool) -> None:
    snapshot = lay_out_hub_cache(tmp_path)
    wanted: list[str] = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        wanted.extend(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    resolve("acme/other", text_only=text_only)
    assert ("*.safetensors" in wanted) is not text_only
    assert "*.json" in wanted
