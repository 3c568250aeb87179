"""From what the user typed to files: a directory, a GGUF file, or a model id of the Hugging Face hub."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tercet_shared.checkpoint.gguf_file import GgufFile
from tercet_shared.errors import CheckpointError, bounded

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PATH_SUFFIXES = (".gguf", ".safetensors", ".bin", ".json", ".pt", ".pth")
_GGUF_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


class SourceKind(Enum):
    """How the checkpoint is stored."""

    HUGGING_FACE = "huggingface"
    """A directory with ``config.json`` and safetensors."""
    GGUF = "gguf"
    """One GGUF file with weights, hyper-parameters, tokenizer and chat template."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint found on this machine.

    Attributes:
        model: What the user named.
        kind: How it is stored.
        path: The directory, or the GGUF file.
        served_name: The name under which it is served unless the user chose another: the stem of the file, the name of
            the directory, or the hub id.
    """

    model: str
    kind: SourceKind
    path: Path
    served_name: str

    @functools.cached_property
    def gguf(self) -> GgufFile:
        """The parsed header of the GGUF file; parsed once.

        Raises:
            CheckpointError: The file is damaged, or this is not a GGUF source.
        """
        if self.kind is not SourceKind.GGUF:
            raise CheckpointError(f"{self.path} is not a GGUF file.")
        return GgufFile.open(self.path)

    def file(self, name: str) -> Path:
        """Returns the path of a file of a Hugging Face directory, whether it exists or not."""
        return self.path / name


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool | None = None,
    text_only: bool = False,
) -> CheckpointSource:
    """Finds the checkpoint that ``model`` names, downloading it from the hub if it is a hub id that is not cached.

    Args:
        model: A directory, a GGUF file, or a hub id. What exists on disk wins over a hub id of the same name.
        revision: Branch, tag or commit, for hub ids only.
        cache_dir: The hub cache; by default that of ``huggingface_hub`` (``HF_HOME``, ``HF_HUB_CACHE``).
        offline: True reads the cache only; by default ``HF_HUB_OFFLINE`` decides.
        text_only: The weights are not needed: of a hub model they are not fetched, and a directory may lack them.

    Raises:
        CheckpointError: There is no such checkpoint, or it is of a kind that is not read.
    """
    if not model or "\0" in model:
        raise CheckpointError("No model is named.")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _directory(model, path, path.resolve().name, text_only=text_only)
        if path.exists():
            return _file(model, path)
    except OSError as error:
        raise CheckpointError(f"{bounded(model, 300)} cannot be read: {error.strerror}.") from None
    if _looks_like_path(model):
        kind = "file" if path.suffix in _PATH_SUFFIXES else "file or directory"
        raise CheckpointError(f"The model {bounded(model, 300)} does not exist: there is no such {kind}.")
    from tercet_shared.checkpoint.hub import fetch  # noqa: PLC0415  # takes 0.2 s, and most models are local

    found = fetch(model, revision, cache_dir, offline=offline, text_only=text_only)
    return _directory(model, found, model, text_only=text_only)


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", ".", "~")) or model.endswith("/") or "\\" in model or model.count("/") > 1
    ) or model.lower().endswith(_PATH_SUFFIXES)


def _file(model: str, path: Path) -> CheckpointSource:
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(
            f"{path} is not a checkpoint: a GGUF file or a directory with config.json and safetensors is expected."
        )
    if _GGUF_SHARD.search(path.stem):
        raise CheckpointError(f"{path} is one part of a split GGUF file; merge the parts into one file first.")
    return CheckpointSource(model, SourceKind.GGUF, path, path.stem)


def _directory(model: str, path: Path, name: str, *, text_only: bool) -> CheckpointSource:
    has_config = (path / "config.json").is_file()
    has_safetensors = any(path.glob("*.safetensors"))
    ggufs = sorted(path.glob("*.gguf"))
    if has_config and (has_safetensors or not ggufs):
        if not text_only and not has_safetensors and not (path / "model.safetensors.index.json").is_file():
            raise _no_weights(path)
        return CheckpointSource(model, SourceKind.HUGGING_FACE, path, name)
    if len(ggufs) == 1:
        return CheckpointSource(model, SourceKind.GGUF, _file(model, ggufs[0]).path, name)
    if ggufs:
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files; name the one to serve.")
    if has_safetensors:
        raise CheckpointError(f"{path} holds safetensors but no config.json.")
    raise _no_weights(path)


def _no_weights(path: Path) -> CheckpointError:
    if any(match for pattern in _PICKLES for match in path.glob(pattern)):
        return CheckpointError(
            f"{path} holds only pickled weights, which are never read because loading them can run code; "
            "safetensors or GGUF weights are needed."
        )
    return CheckpointError(f"{path} holds no checkpoint: neither config.json with safetensors nor a GGUF file.")
