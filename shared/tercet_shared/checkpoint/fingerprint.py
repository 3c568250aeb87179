"""A short name for a set of weights, so that two processes know that they serve the same model."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from tercet_shared.errors import CheckpointError

if TYPE_CHECKING:
    from tercet_shared.checkpoint.config import ModelConfig
    from tercet_shared.checkpoint.weights import WeightIndex

_SAMPLES = 4
_SAMPLE_BYTES = 256


def model_fingerprint(config: ModelConfig, weights: WeightIndex) -> str:
    """Returns 128 bits in hexadecimal over configuration, tensor table and samples of every tensor.

    Samples are taken at evenly spaced places, so that fine-tunes of one model differ while only a few pages per tensor
    are read. The same tensors give the same fingerprint however they are spread over files.

    Raises:
        CheckpointError: A weight file can no longer be read.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(config.raw, sort_keys=True, ensure_ascii=True, default=list).encode("ascii"))
    handles = {}
    try:
        for entry in (stored for name in sorted(weights) for stored in weights[name].stored):
            digest.update(f"\n{entry.name} {entry.dtype} {entry.shape}\n".encode())
            if entry.file not in handles:
                handles[entry.file] = entry.file.open("rb", buffering=0)
            file = handles[entry.file]
            last = max(0, entry.nbytes - _SAMPLE_BYTES)
            for start in sorted({last * part // (_SAMPLES - 1) for part in range(_SAMPLES)}):
                file.seek(entry.offset + start)
                digest.update(file.read(min(_SAMPLE_BYTES, entry.nbytes)))
    except OSError as error:
        raise CheckpointError(f"The weights can no longer be read: {error}.") from None
    finally:
        for file in handles.values():
            file.close()
    return digest.hexdigest()
