"""From token ids to text that a client may see: incremental detokenizing and stop strings."""

from tercet_frontend.text.detokenizer import Detokenizer
from tercet_frontend.text.stops import StopStrings
from tercet_frontend.text.stream import TextDelta, TextStream

__all__ = ["Detokenizer", "StopStrings", "TextDelta", "TextStream"]
