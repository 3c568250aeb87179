"""What every request with a body asks for, and what it belongs to: a model, and a session."""

from __future__ import annotations

from pydantic import Field

from tercet_frontend.schemas.validation import Strict, Text


class Asked(Strict):
    """A request that names a model, or leaves that open."""

    model: Text | None

    @property
    def session(self) -> str:
        """What it belongs to, for requests that are best served in one place; empty where it does not say."""
        return ""


class SessionFields(Asked):
    """Fields from which the session is taken: the first that is given."""

    prompt_cache_key: Text | None = Field(None, description="Requests of one key go to one core, where possible.")
    user: Text | None = Field(None, description="The same, where there is no prompt_cache_key.")
    safety_identifier: Text | None = Field(None, description="The same, where there is no user either.")

    @property
    def session(self) -> str:
        """See `Asked`."""
        return self.prompt_cache_key or self.user or self.safety_identifier or ""
