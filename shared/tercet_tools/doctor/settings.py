"""What `tercet doctor` can be told."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from tercet_shared.config import Dtype, Quantization  # noqa: TC001  # pydantic reads the annotation
from tercet_tools.settings import ToolSettings


class DoctorSettings(ToolSettings):
    """Looks at this machine: what it offers to Tercet, and what a model would need and reach here."""

    model_config = SettingsConfigDict(cli_prog_name="tercet doctor", cli_shortcuts={"as-json": "json"})
    EXAMPLES = """\
  tercet doctor
  tercet doctor ./SmolLM2-135M-Instruct.Q4_1.gguf
  tercet doctor ./checkpoint --dtype float32 --port 9000
  tercet doctor --json --no-measure

Nothing is changed, nothing is downloaded. The bandwidth of memory is measured for about a second.

exit codes: 0 nothing that is needed is missing (there may be warnings), 1 something is, 2 wrong usage.
"""

    model: CliPositionalArg[str | None] = Field(
        None, description="Directory of a Hugging Face checkpoint, a GGUF file, or a cached model id of the hub."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Dtype = Field(
        "auto", description="Type of weights and KV cache to reckon with; auto takes what is fast here."
    )
    quantization: Quantization = Field("auto", description="What is done with quantized weights; see tercet serve.")
    host: str = Field("127.0.0.1", description="Address on which the server would listen.")
    port: int = Field(8000, ge=0, le=65_535, description="Port on which the server would listen.")
    redis_url: str | None = Field(None, description="Redis that should be reachable, as redis://host:port/0.")
    measure: bool = Field(True, description="Measure the bandwidth of memory.")
    as_json: bool = Field(False, description="Print everything as JSON.")
