"""What stands behind a front end's HTTP: the models' texts, the registry, and the cores."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tercet_frontend.cores import CorePool, StreamOptions
from tercet_frontend.fleets import finds_cores, open_fleet
from tercet_frontend.models import Aliases, Announced, ModelCatalog, ServedModels, TextLibrary, named_models
from tercet_frontend.routing import Router, routing_policy
from tercet_frontend.tokenizing import ModelText
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tercet_frontend.admission import Admission
    from tercet_frontend.cores.stream import CoreStream
    from tercet_frontend.models import NamedModel
    from tercet_shared.checkpoint import Checkpoint
    from tercet_shared.config import FrontendSettings
    from tercet_shared.lifecycle.report import Reporter
    from tercet_shared.registry.interface import Fleet


async def run_backend(
    settings: FrontendSettings,
    reporter: Reporter,
    admission: Admission,
    able: asyncio.Event,
    frontend_id: str,
    known: Callable[[CorePool, Fleet], None] = lambda *_: None,
) -> None:
    """Loads the models that were named, then keeps the cores connected until it is cancelled.

    Args:
        settings: of the front end.
        reporter: is told how far it is.
        admission: gets what requests work with.
        able: set when the first request can be served.
        frontend_id: name of this front end.
        known: gets the cores and the registry once they are there.

    Raises:
        ConfigurationError: settings cannot work.
        CheckpointError: a model that was named cannot be read.
    """
    named = named_of(settings)
    Aliases(settings.model_alias, settings.model_split)  # what is wrong with them is known before anything is read
    router: Router[CoreStream] = Router(routing_policy(settings.routing_policy))
    options = StreamOptions.of(settings)
    async with open_fleet(settings, router if router.wants_blocks else None) as (fleet, sink):
        discovers = finds_cores(settings)
        announced = Announced(settings.max_discovered_models) if discovers else None
        catalog = ModelCatalog(named, TextLibrary(_reader(settings)), announced)
        reporter.progress("loading tokenizer")
        await catalog.load()
        aliases = Aliases(settings.model_alias, settings.model_split, models=catalog.names, complete=announced is None)
        pool = CorePool(fleet, models=catalog, router=router, options=options, frontend_id=frontend_id, sink=sink)
        known(pool, fleet)
        admission.loaded(ServedModels(catalog, pool, aliases))
        reporter.progress("waiting for cores")
        async with asyncio.TaskGroup() as group:
            group.create_task(pool.run())
            group.create_task(catalog.run(fleet))
            await pool.wait_until_ready()
            able.set()


def named_of(settings: FrontendSettings) -> list[NamedModel]:
    """Returns the models that the settings name.

    Raises:
        ConfigurationError: see `named_models`; or there are none, and none can be found.
    """
    named = named_models(settings.model, served_names=settings.served_model_name, revision=settings.revision)
    if not named and not finds_cores(settings):
        raise ConfigurationError("No model is given (MODEL), and no Redis to find one in.", param="model")
    return named


def _reader(settings: FrontendSettings) -> Callable[[Checkpoint], ModelText]:
    def read(checkpoint: Checkpoint) -> ModelText:
        return ModelText.read(
            checkpoint,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            trust_request_template=settings.trust_request_chat_template,
        )

    return read
