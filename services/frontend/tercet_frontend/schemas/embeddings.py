"""``POST /v1/embeddings``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from tercet_frontend.schemas.completion import Prompt, prompts_in
from tercet_frontend.schemas.validation import Strict, Text

INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class EmbeddingRequest(Strict):
    """Texts of which each becomes one vector."""

    model: Text = Field(description="Name of a served model.")
    input: Annotated[
        tuple[Prompt, ...], BeforeValidator(partial(prompts_in, name="input")), WithJsonSchema(INPUT_SCHEMA)
    ] = Field(description="One text or several, as text or as token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: a list of numbers; base64: their little-endian float32 bytes."
    )
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = Field(
        None, description="Keep this many of the first elements; the vector is normalized again."
    )
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Which hidden states make the vector: the last token's (default) or the mean of all."
    )
    normalize: bool | None = Field(None, description="Scale the vector to length 1; true by default.")
    user: Text | None = Field(None, description="Accepted, without effect.")
