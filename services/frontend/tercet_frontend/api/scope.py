"""The models that an API key may use: for its holder there are no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_shared.errors import ModelNotFoundError, UnavailableError, bounded

if TYPE_CHECKING:
    from tercet_frontend.access.keys import ApiKey
    from tercet_frontend.admission import Models, Serving
    from tercet_frontend.models.served import ListedModel


def visible(models: Models, key: ApiKey) -> list[ListedModel]:
    """Returns the models that can be asked for now, as far as ``key`` may use them."""
    return [listed for listed in models.listed() if key.may_use(listed.model.name)]


def serving_of(models: Models, key: ApiKey, name: str | None, session: str = "") -> Serving:
    """Returns what a request with ``key`` works with.

    Args:
        models: all that there are.
        key: that the request came with; it counts for the name that was asked for, whatever is behind it.
        name: of a model, alias or split; None takes the first that there is.
        session: whose request it is, or empty.

    Raises:
        ModelNotFoundError: there is none of that name, as far as the key's holder can tell.
        UnavailableError: it cannot be served now.
    """
    if name is None:
        listed = visible(models, key)
        if not listed:
            raise UnavailableError("No core is ready.")
        name = listed[0].model.name
    elif not key.may_use(name):
        raise ModelNotFoundError(f"There is no model {bounded(name, 100)!r} here.", param="model")
    return models.serving(name, session)
