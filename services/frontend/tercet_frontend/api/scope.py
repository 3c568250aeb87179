"""The models that an API key may use: for its holder there are no others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tercet_frontend.access.keys import ApiKey
    from tercet_frontend.admission import Serving
    from tercet_frontend.cores.interface import Cores, Generation, GenerationRequest, ServedModel


class ScopedCores:
    """`Cores` as the holder of a key sees them."""

    def __init__(self, cores: Cores, key: ApiKey) -> None:
        self._cores = cores
        self._key = key

    def not_ready_reason(self) -> str | None:
        """See `Cores`."""
        return self._cores.not_ready_reason()

    def models(self) -> list[ServedModel]:
        """See `Cores`; those of the key."""
        return [model for model in self._cores.models() if self._key.may_use(model.name)]

    def submit(self, request: GenerationRequest) -> Generation:
        """See `Cores`."""
        return self._cores.submit(request)


def scoped(serving: Serving, key: ApiKey) -> Serving:
    """Returns what the holder of ``key`` works with."""
    return replace(serving, cores=ScopedCores(serving.cores, key)) if key.models else serving
