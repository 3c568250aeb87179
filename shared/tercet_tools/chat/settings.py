"""What `tercet chat` can be told."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from tercet_shared.config import Names  # noqa: TC001  # pydantic reads the annotation
from tercet_shared.errors import ConfigurationError
from tercet_tools.settings import ToolSettings


def _strings(value: object) -> object:
    # Commas are part of a stop string, so a variable holds one string or a JSON list.
    if isinstance(value, str):
        return json.loads(value) if value.startswith("[") else [value]
    return value


StopStrings = Annotated[list[str], NoDecode, BeforeValidator(_strings)]


class ChatSettings(ToolSettings):
    """Talks to a server with an OpenAI-style API.

    At a terminal it is a conversation, in which /help lists what else can be done. Otherwise the question is read from
    standard input, and only the answer is written to standard output.
    """

    model_config = SettingsConfigDict(cli_prog_name="tercet chat")
    EXAMPLES = """\
  tercet chat
  tercet chat --url http://10.0.0.5:8000 --system "Answer in one sentence." --temperature 0
  echo "Name three rivers" | tercet chat --max-tokens 60
"""

    url: str = Field("http://127.0.0.1:8000", description="Address of the server, with or without /v1.")
    model: str | None = Field(None, description="Name of the model; by default the first that the server lists.")
    system: str = Field("", description="System prompt.")
    temperature: float | None = Field(None, description="0 takes the most likely token; the server has a default.")
    top_p: float | None = Field(None, description="Draw from the most likely tokens of this total probability.")
    max_tokens: int | None = Field(None, description="Tokens of an answer at most.")
    seed: int | None = Field(None, description="Makes sampled answers repeatable.")
    stop: StopStrings = Field(default_factory=list, description="Strings before which an answer ends.")
    api_key: Names = Field(
        default_factory=list, description="Key that the server asks for; better given in the environment."
    )

    def base_url(self) -> httpx.URL:
        """Returns the URL below which the API is.

        Raises:
            ConfigurationError: it is not an http or https URL.
        """
        text = self.url if "://" in self.url else f"http://{self.url}"
        try:
            url = httpx.URL(text.rstrip("/"))
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigurationError(
                f"--url (TERCET_URL): {self.url!r} is not an address such as http://127.0.0.1:8000.", param="url"
            )
        return url if url.path.endswith("/v1") else url.copy_with(path=f"{url.path.rstrip('/')}/v1")

    def parameters(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, as the API names them."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        return {name: value for name, value in given.items() if value is not None} | (
            {"stop": list(self.stop)} if self.stop else {}
        )
