"""All cores of a front end that were named to it at its start."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tercet_frontend.cores.interface import ServedModel
from tercet_frontend.cores.stream import CoreStream
from tercet_shared.errors import ConfigurationError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_frontend.cores.generation import StreamGeneration
    from tercet_frontend.cores.interface import GenerationRequest
    from tercet_frontend.cores.options import StreamOptions
    from tercet_frontend.routing import RoutingPolicy


class StaticCores:
    """`Cores` over a fixed list of addresses. Building it starts nothing; `run` does.

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
        self._names = tuple(dict.fromkeys(names))
        self._policy = policy
        self._stopping = asyncio.Event()
        self._change = asyncio.Event()
        self._streams = [
            CoreStream(
                checked_address(address),
                frontend_id=frontend_id,
                tokenizer_fingerprint=tokenizer_fingerprint,
                options=options,
                changed=self._changed,
            )
            for address in addresses
        ]

    @property
    def streams(self) -> Sequence[CoreStream]:
        """One for each address, in their order."""
        return self._streams

    async def run(self) -> None:
        """Keeps all streams connected. Returns after `stop`, when they are closed; cancelling does the same.

        Generations that still run then end with `UnavailableError`. Runs once.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(stream.run()) for stream in self._streams]
            await self._stopping.wait()
            for task in running:
                task.cancel()

    def stop(self) -> None:
        """Lets `run` end."""
        self._stopping.set()

    async def wait_until_ready(self) -> None:
        """Returns when a request can be served."""
        while self.not_ready_reason() is not None:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Returns when a core was connected, lost, refused or began to drain, or changed what it serves."""
        await self._change.wait()

    def not_ready_reason(self) -> str | None:
        """See `Cores`."""
        reasons = [stream.not_ready_reason() for stream in self._streams]
        if None in reasons:
            return None
        others = len(reasons) - 1
        return f"{reasons[0]}" + (f" ({others} more cores are not ready either.)" if others else "")

    def models(self) -> list[ServedModel]:
        """See `Cores`. Where cores differ in a limit, the smallest counts, so that any of them can serve."""
        infos = [stream.info for stream in self._ready() if stream.info is not None]
        if not infos:
            return []
        max_model_len = min(info.max_model_len for info in infos)
        vocab_size = min(info.vocab_size for info in infos)
        return [ServedModel(name, max_model_len, vocab_size) for name in self._names]

    def submit(self, request: GenerationRequest) -> StreamGeneration:
        """See `Cores`."""
        ready = self._ready()
        if not ready:
            raise UnavailableError(self.not_ready_reason() or "No core is ready.")
        stream = ready[0] if len(ready) == 1 else self._policy.choose(request, ready)
        return stream.submit(request)

    def _ready(self) -> list[CoreStream]:
        return [stream for stream in self._streams if stream.not_ready_reason() is None]

    def _changed(self) -> None:
        event, self._change = self._change, asyncio.Event()
        event.set()


def checked_address(address: str) -> str:
    """Returns ``address``. Raises `ConfigurationError` unless it is ``host:port`` or ``unix:/path``."""
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return address
    else:
        host, colon, port = address.rpartition(":")
        if host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535:
            return address
    raise ConfigurationError(f"{address!r} is not an address: give host:port or unix:/path (--core).")
