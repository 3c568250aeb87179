"""What a model needs here, and what it could reach: facts of its checkpoint, and estimates from the bandwidth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tercet_shared.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tercet_shared.checkpoint import WeightIndex
    from tercet_shared.config import Dtype, Quantization

SIZES: Final[dict[str, int]] = {"bfloat16": 2, "float32": 4}
"""Bytes of an element of the types that the worker computes in."""

STORED: Final = "as stored"
INT8: Final = "int8"
_INT8_BITS: Final = 8.5
"""Eight bits of a weight, and its part in the scale of 32."""
_COMPACT: Final = 1.5
"""Bytes of a dense bfloat16 weight once it is compact."""

KV_SHARE: Final = 4
"""Unless told otherwise the worker takes one part in so many of the free memory for the KV cache."""

_EMBEDDING: Final = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form in which the weights can be held. Sizes are bytes.

    Attributes:
        nbytes: memory for all weights.
        loading: the same while they are loaded, and none is compact yet.
        read_per_token: what is read of them for one token: of an input embedding that is not the output layer only a
            row is.
        kv_dtype: type of the KV cache that goes with it.
    """

    nbytes: int
    loading: int
    read_per_token: int
    kv_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint's facts. Sizes are bytes.

    Attributes:
        name: under which it would be served.
        path: where it lies.
        architecture: as Hugging Face names it.
        parameters: elements of all tensors.
        stored: bytes by type as stored.
        layers, kv_heads, head_dim: what a token's KV takes.
        context: tokens that the model was made for.
        forms: in which its weights can be held, by name.
        form: the one in which the worker would.
    """

    name: str
    path: str
    architecture: str
    parameters: int
    stored: dict[str, int]
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    forms: dict[str, Form]
    form: str

    @property
    def weights(self) -> Form:
        """The form in which the worker would hold the weights."""
        return self.forms[self.form]

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * SIZES[self.weights.kv_dtype]

    def kv_tokens(self, available: int) -> tuple[int, int]:
        """Returns the tokens of KV that fit beside the weights: by default, and at most."""
        room = max(0, available - self.weights.nbytes)
        return room // KV_SHARE // self.kv_bytes_per_token, room // self.kv_bytes_per_token

    def decode_ceiling(self, bandwidth: float, form: str | None = None) -> float:
        """Tokens per second of one stream if nothing but reading the weights took time; ``bandwidth`` in bytes/s."""
        return bandwidth / self.forms[form or self.form].read_per_token


def read_model(
    name: str,
    *,
    revision: str | None,
    dtype: Dtype,
    quantization: Quantization,
    fast_bfloat16: bool,
    compact_bfloat16: bool,
) -> Model:
    """Reads the headers of a checkpoint; nothing is downloaded.

    Args:
        name: what to read.
        revision: of a hub model.
        dtype: to reckon with.
        quantization: what is done with quantized weights.
        fast_bfloat16: whether the worker takes bfloat16 by itself.
        compact_bfloat16: whether it makes dense bfloat16 weights compact.

    Raises:
        CheckpointError: it cannot be read, or is not on this machine.
    """
    checkpoint = Checkpoint.open(name, revision=revision, offline=True)
    config, weights = checkpoint.config, checkpoint.weights
    stored: Counter[str] = Counter()
    for entry in weights.entries.values():
        stored[entry.dtype] += entry.nbytes
    computed = dtype if dtype != "auto" else "bfloat16" if fast_bfloat16 else "float32"
    forms = _forms(weights, tied=config.tie_word_embeddings, compact=compact_bfloat16)
    form: str = computed
    if computed == "bfloat16" and quantization == "int8":
        form = INT8
    elif computed == "bfloat16" and quantization == "auto" and STORED in forms:
        form = STORED
    return Model(
        name=checkpoint.served_name,
        path=str(checkpoint.source.path),
        architecture=config.architecture,
        parameters=weights.total_elements,
        stored=dict(stored.most_common()),
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context=config.max_position_embeddings,
        forms=forms,
        form=form,
    )


def _forms(weights: WeightIndex, *, tied: bool, compact: bool) -> dict[str, Form]:
    """Returns the forms, the smallest first; ``as stored`` only where something is quantized."""
    skipped = None if tied else _EMBEDDING

    def sizes(dense: float, *, keep: bool) -> dict[str, int]:
        return {
            entry.name: (keep and entry.kept_nbytes) or int(entry.elements * dense)
            for entry in weights.entries.values()
        }

    def form(dense: float, kv_dtype: str, *, keep: bool) -> Form:
        loading = sizes(dense, keep=keep)
        held = sizes(_COMPACT, keep=keep) if compact and dense == SIZES["bfloat16"] else loading
        total = sum(held.values())
        return Form(
            nbytes=total,
            loading=sum(loading.values()),
            read_per_token=total - held.get(skipped or "", 0),
            kv_dtype=kv_dtype,
        )

    forms = {
        INT8: form(_INT8_BITS / 8, "bfloat16", keep=True),
        "bfloat16": form(SIZES["bfloat16"], "bfloat16", keep=False),
        "float32": form(SIZES["float32"], "float32", keep=False),
    }
    if any(entry.kept_nbytes for entry in weights.entries.values()):
        forms = {STORED: form(SIZES["bfloat16"], "bfloat16", keep=True)} | forms
    return forms
