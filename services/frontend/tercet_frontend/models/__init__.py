"""The models behind one address: whose text is here, under which names they are asked for, which one a request gets."""

from tercet_frontend.models.aliases import Aliases
from tercet_frontend.models.announced import Announced
from tercet_frontend.models.catalog import ModelCatalog
from tercet_frontend.models.interface import CoreModel, ModelNames
from tercet_frontend.models.library import TextLibrary
from tercet_frontend.models.served import ListedModel, ServedModels
from tercet_frontend.models.sources import NamedModel, named_models

__all__ = [
    "Aliases",
    "Announced",
    "CoreModel",
    "ListedModel",
    "ModelCatalog",
    "ModelNames",
    "NamedModel",
    "ServedModels",
    "TextLibrary",
    "named_models",
]
