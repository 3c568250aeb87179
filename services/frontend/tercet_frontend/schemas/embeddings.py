"""``POST /v1/embeddings``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from tercet_frontend.schemas.asked import Asked
from tercet_frontend.schemas.completion import Prompt, prompts_in
from tercet_frontend.schemas.unbuilt import Neutral, refuse_unbuilt
from tercet_frontend.schemas.validation import Text  # noqa: TC001  # pydantic evaluates it

INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}

_UNBUILT: dict[str, Neutral] = {
    "additional_data": (),
    "embed_dtype": ("float32",),
    "endianness": ("little",),
    "messages": ([],),
    "mm_processor_kwargs": ({},),
}
"""Fields that clients know from vLLM."""


class EmbeddingRequest(Asked):
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
    add_special_tokens: bool | None = Field(None, description="Add what the tokenizer adds around a text; the default.")
    truncate_prompt_tokens: int | None = Field(None, description="Keep the last so many tokens; -1: what fits.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description="Smaller is served first.")
    user: Text | None = Field(None, description="Requests of one user go to one core, where possible.")

    @property
    def session(self) -> str:
        """See `Asked`."""
        return self.user or ""

    @model_validator(mode="before")
    @classmethod
    def _unbuilt(cls, raw: Any) -> Any:
        refuse_unbuilt(raw, _UNBUILT)
        return raw
