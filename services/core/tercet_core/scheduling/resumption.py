"""Requests whose earlier attempt yielded all that there is: only its end did not arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet_core.scheduling.outputs import End
from tercet_core.scheduling.request import Ending

if TYPE_CHECKING:
    from tercet_core.scheduling.request import Request


def end_of(request: Request, max_model_len: int) -> End | None:
    """Returns how the resumed output ends its request, or None where it does not.

    That is as an undisturbed run would have ended: a stop token counts more than a limit. Of a request with a grammar
    all stop tokens are known once it has its guide.
    """
    output = len(request.tokens) - request.prompt_len
    if output <= 0:
        return None
    last = int(request.tokens[-1])
    if last in request.stop_ids:
        return End(0, Ending.STOP, last)
    if output >= request.params.max_tokens or len(request.tokens) >= max_model_len:
        return End(0, Ending.LENGTH)
    return None
