"""The Jinja environment of chat templates: the one that Transformers offers them, in a sandbox with limits on work.

A template is a program, and nothing in the language keeps it from looping for ever or from building values that fill
the memory. So every loop counts what it iterates over and every call counts once, against a budget that belongs to the
rendering and that also looks at the clock; and what makes long values out of short ones is refused beyond `MAX_LENGTH`.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_LENGTH = 16 << 20
"""Characters or items of any one value; far above any context, below what hurts."""

_PER_STEP = 256
"""Characters or items that count as much as a call: building long values takes time, and keeping them memory."""

_MAX_BITS = 4_096
_MAX_WIDTH = 1_000
"""Columns that a format or a filter may pad or indent to."""

_WIDE = re.compile(r"\d{4,}")
_STARRED = re.compile(r"%[-+ #0-9.]*\*")
_NESTED = re.compile(r"\{[^{}]*\{")
_PLAIN = (str, int, float, bool, type(None), jinja2.Undefined)


class BudgetError(Exception):
    """A rendering did more work than it may."""


class Budget:
    """The work that one rendering may do.

    Args:
        steps: iterations and calls.
        seconds: of time.
    """

    __slots__ = ("_deadline", "_steps")

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps = steps
        self._deadline = time.monotonic() + seconds

    def spend(self, steps: int) -> None:
        """Raises `BudgetError` when it is used up."""
        self._steps -= steps
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise BudgetError

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is rendered in this context, by this thread, is counted."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Budget] = ContextVar("budget of the template that is being rendered")


def create_environment() -> ImmutableSandboxedEnvironment:
    """Returns a new environment. What it compiles can be rendered only while a `Budget` is running."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], finalize=_finalized
    )
    del environment.globals["lipsum"]  # makes text by the megabyte
    environment.filters.update(_filters(environment.filters))
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` marks the assistant's text for training; here it is rendered."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block into a scope around its body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """See the module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_counted")
        for node in list(tree.find_all(nodes.Node)):
            _replace_concatenations(node)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes ``left operator right``."""
        if operator == "+":
            _check_length(_len(left) + _len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,), _STARRED)
        elif operator == "**" and (abs(left) > 1_000_000 or abs(right) > 1_000):
            raise SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or a macro."""
        if isinstance(obj, LoopContext):
            args = tuple(_count(argument) for argument in args)
        owner = getattr(obj, "__self__", None)
        _current.get().spend(1)
        if isinstance(owner, str):
            _current.get().spend(len(owner) // _PER_STEP)
            args = _check_method(owner, obj.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the sandbox's stand-in for a string's ``format``, bounded; None for anything else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()), _NESTED)
            return wrapped(*args, **kwargs)

        return bounded


def _filtered(expression: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(
        expression, name, [], [], None, None, lineno=expression.lineno, environment=expression.environment
    )


def _replace_concatenations(node: nodes.Node) -> None:
    """Makes each ``a ~ b`` below ``node`` a call of a filter, which can be checked."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, field, _joined_node(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Concat):
                    value[index] = _joined_node(item)


def _joined_node(node: nodes.Concat) -> nodes.Filter:
    items = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
    return _filtered(items, "_joined")


# ------------------------------------------------------------------------------------------------------------- counting


@pass_context  # also keeps the compiler from computing it ahead
def _counted(_context: Context, value: Any) -> Any:
    return _count(value)


def _count(value: Any) -> Any:
    """Charges the budget for iterating over ``value``, now or as it is done."""
    if isinstance(value, Sized):
        _current.get().spend(len(value))
        return value
    return _counting(value) if isinstance(value, Iterable) else value


def _counting(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _current.get().spend(1)
        yield value


# ---------------------------------------------------------------------------------------------------- lengths of values


def _len(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"a value is longer than {MAX_LENGTH}")
    _current.get().spend(length // _PER_STEP)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise SecurityError("a number is too large")
        return
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            _check_length(_written(value) * count)


def _check_format(text: str, values: Iterable[Any], nested: re.Pattern[str]) -> None:
    """Bounds what ``text`` can become with ``values`` in its fields."""
    if _WIDE.search(text) or nested.search(text):
        raise SecurityError("a format is too wide")
    longest = max((_written(value) for value in values), default=0)
    _check_length(len(text) * (longest + 1))


def _written(value: Any) -> int:
    """Returns how long ``value`` is when it is written out, at least; stops counting beyond the limit.

    A value may hold another many times, so that it is small in memory and huge in writing.
    """
    total = 0
    pending = [value]
    while pending and total <= MAX_LENGTH:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += len(item)
            pending.extend(itertools.chain(item.keys(), item.values()))
        elif isinstance(item, (list, tuple)):
            total += len(item)
            pending.extend(item)
        else:
            total += 1
    return total


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Refuses a string's method where the result would be too long; returns the arguments to call it with."""
    values = (*args, *kwargs.values())
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_replacement(owner, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], Iterable):
        items = list(args[0])
        _check_length(_written(items) + len(owner) * len(items))
        return (items, *args[1:])
    elif name in {"center", "ljust", "rjust", "zfill", "expandtabs"}:
        if any(isinstance(value, int) and value > _MAX_WIDTH for value in values):
            raise SecurityError("a width is too large")
    elif name == "translate":
        raise SecurityError("translate is not available")
    return args


def _check_replacement(text: str, old: str, new: str) -> None:
    count = text.count(old) if old else len(text) + 1
    _check_length(len(text) + count * max(len(new) - len(old), 0))


def _finalized(value: Any) -> Any:
    """Checks what is written into the result; plain values are by far the most."""
    if not isinstance(value, _PLAIN):
        _check_length(_written(value))
    return value


# -------------------------------------------------------------------------------------------------------------- filters


@pass_context
def _joined(_context: Context, values: list[Any]) -> str:
    _check_length(_written(values))
    return "".join(map(str, values))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100  # templates pass it by position or name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100  # as above
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    _check_length(_written(value))
    _check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_width(width: Any) -> None:
    if (isinstance(width, int) and width > _MAX_WIDTH) or (isinstance(width, str) and len(width) > _MAX_WIDTH):
        raise SecurityError("a width is too large")


def _filters(builtin: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Returns the filters that are other than Jinja's: some are ours, some are bounded."""
    replace, join, format_filter, sum_filter = (builtin[name] for name in ("replace", "join", "format", "sum"))

    def bounded_replace(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _check_length(_written(s))
        _check_replacement(str(s), str(old), str(new))
        return replace(eval_ctx, s, old, new, count)

    def bounded_join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(_count(value))
        _check_length(_written(items) + len(str(d)) * len(items))
        return join(context, items, d, attribute)

    def bounded_format(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(value), (*args, *kwargs.values()), _STARRED)
        return format_filter(value, *args, **kwargs)

    def bounded_sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, (int, float)):
            raise SecurityError("sum adds numbers only")
        return sum_filter(environment, iterable, attribute, start)

    bounded: dict[str, Callable[..., Any]] = {
        "replace": jinja2.pass_eval_context(bounded_replace),
        "join": jinja2.pass_eval_context(bounded_join),
        "format": bounded_format,
        "sum": jinja2.pass_environment(bounded_sum),
    }
    # Their numbers are widths and counts; their texts are used once per line or item.
    for name in ("center", "indent", "batch", "slice", "wordwrap"):
        bounded[name] = _with_small_arguments(builtin[name])
    return {**bounded, "tojson": _to_json, "_counted": _counted, "_joined": _joined}


def _with_small_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    environment_first = getattr(original, "jinja_pass_arg", None) is not None

    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *options = args[1:] if environment_first else args
        for option in (*options, *kwargs.values()):
            _check_width(option)
        _check_length(_written(value))
        return original(*args, **kwargs)

    if environment_first:
        bounded.jinja_pass_arg = original.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


# ------------------------------------------------------------------------------------------------------------ functions


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_format(form, (), _STARRED)
    return datetime.now().astimezone().strftime(form)
