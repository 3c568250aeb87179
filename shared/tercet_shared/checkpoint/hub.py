"""Fetching a model from the Hugging Face hub, or from its cache on this machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of its HTTP library
    GatedRepoError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from tercet_shared.errors import CheckpointError, bounded

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched from the hub: never pickles, never code."""

HUB_TEXT_PATTERNS = ("*.json", "*.jinja")
"""The part of it that is not weights."""

HUB_IGNORED = ("*/*", "consolidated*.safetensors")
"""Sub-directories (other formats) and a second copy of the weights that some repositories carry."""


def fetch(
    model: str, revision: str | None, cache_dir: Path | None, *, offline: bool | None, text_only: bool = False
) -> Path:
    """Returns the snapshot directory of a hub id, downloading what the cache lacks; arguments as in `source.resolve`.

    Raises:
        CheckpointError: There is no such model or revision, it is gated, or the hub cannot be reached.
    """
    shown = bounded(model, 200) + (f" (revision {bounded(revision, 100)})" if revision else "")
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(HUB_TEXT_PATTERNS if text_only else HUB_PATTERNS),
                ignore_patterns=list(HUB_IGNORED),
                local_files_only=bool(offline),
            )
        )
    except HFValidationError:
        raise CheckpointError(
            f"The model {bounded(model, 300)} does not exist: it is no file or directory here, and no valid hub id."
        ) from None
    except GatedRepoError:
        raise CheckpointError(f"The hub model {shown} is gated: ask for access there, and set HF_TOKEN.") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"The model {shown} does not exist: it is no file or directory here, and the hub knows no such model "
            "(or it is private and HF_TOKEN is not set)."
        ) from None
    except (RevisionNotFoundError, RevisionResolutionError):
        raise CheckpointError(f"The hub model {shown} has no such revision.") from None
    except IncompleteSnapshotError:
        raise CheckpointError(
            f"The hub model {shown} is only partly in the cache, and the hub cannot be reached for the rest."
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"The model {shown} is no file or directory here, is not in the hub cache, and the hub cannot be reached "
            "(or offline mode is on)."
        ) from None
    except (HTTPError, OSError) as error:
        raise CheckpointError(f"The hub model {shown} cannot be fetched: {bounded(str(error), 300)}") from None
