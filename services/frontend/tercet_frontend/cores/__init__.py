"""The front end's side of the engine stream: cores, and the token streams that they yield."""

from tercet_frontend.cores.options import StreamOptions
from tercet_frontend.cores.pool import CorePool
from tercet_frontend.cores.static import StaticCores

__all__ = ["CorePool", "StaticCores", "StreamOptions"]
