"""Errors about a chat request that was made of another kind of request: they name the field that its client sent."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tercet_shared.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces names in errors that leave the context.

    Args:
        names: regular expressions that match the beginning of a path, and what stands for it; the first that matches
            counts.
    """
    try:
        yield
    except RequestError as error:
        for pattern, name in names.items():
            if error.param is not None and re.match(pattern, error.param):
                param = re.sub(rf"\A(?:{pattern})", name, error.param)
                raise type(error)(error.message.replace(error.param, param), param=param) from None
        raise
