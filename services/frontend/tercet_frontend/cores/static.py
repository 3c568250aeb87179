"""The cores of a front end to which all of them were named at its start, and which serve one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_frontend.cores.connection import checked_address
from tercet_frontend.cores.pool import CorePool
from tercet_frontend.routing import Router
from tercet_shared.errors import ConfigurationError
from tercet_shared.registry.static import StaticFleet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tercet_frontend.cores.options import StreamOptions
    from tercet_frontend.cores.stream import CoreStream
    from tercet_frontend.models.interface import CoreModel
    from tercet_frontend.routing import RoutingPolicy


class StaticCores(CorePool):
    """A `CorePool` over a fixed list of addresses.

    Args:
        addresses: ``host:port`` or ``unix:/path``, at least one.
        names: under which the model is served, at least one; all cores serve the same model.
        tokenizer_fingerprint: of this front end's tokenizer; cores with another one are not used.
        policy: chooses a core for each request.
        options: of every stream.
        frontend_id: name of this front end, for the cores' logs.

    Raises:
        ConfigurationError: no addresses, the same one twice, or one that is none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        names: Sequence[str],
        tokenizer_fingerprint: str,
        policy: RoutingPolicy,
        options: StreamOptions,
        frontend_id: str,
    ) -> None:
        if not addresses:
            raise ConfigurationError("No core is given (--core).")
        if len(set(addresses)) != len(addresses):
            raise ConfigurationError("A core is given twice (--core).")
        if not names:
            raise ConfigurationError("The model has no name.")
        for address in addresses:
            checked_address(address)
        router: Router[CoreStream] = Router(policy)
        super().__init__(
            StaticFleet(addresses),
            models=OneModel(names, tokenizer_fingerprint),
            router=router,
            options=options,
            frontend_id=frontend_id,
            sink=router if router.wants_blocks else None,
        )


class OneModel:
    """`ModelNames` of a front end that knows one model, which has its names whatever the cores call it.

    Args:
        names: of the model; one that is given twice counts once.
        tokenizer_fingerprint: of its tokenizer.
    """

    def __init__(self, names: Sequence[str], tokenizer_fingerprint: str) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._tokenizer_fingerprint = tokenizer_fingerprint

    def names_of(self, core: CoreModel) -> tuple[str, ...]:
        """See `ModelNames`."""
        return self._names if core.tokenizer_fingerprint == self._tokenizer_fingerprint else ()

    def refusal(self, core: CoreModel) -> str:
        """See `ModelNames`."""
        return f"A core serves {core.model_name}, whose tokenizer differs from this front end's."

    def watch(self, changed: Callable[[], None]) -> None:
        """See `ModelNames`: nothing changes."""
