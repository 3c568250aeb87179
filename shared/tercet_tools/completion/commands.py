"""The commands and their flags, read off the settings classes: what ``--help`` knows, completion knows."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tercet_shared.config import _Settings as Settings

SHELLS: Final = ("bash", "zsh", "fish")

_POSITIONAL: Final = "model"
_HIDDEN: Final = {"report_fd", "listen_fd", "process_socket", "accept_when_ready"}
"""Fields that nobody types."""

_SOURCES: Final = (
    ("serve", "run everything on this machine", "tercet_shared.config", "ServeSettings"),
    ("frontend", "run one front end", "tercet_shared.config", "FrontendSettings"),
    ("core", "run one core", "tercet_shared.config", "CoreSettings"),
    ("worker", "run one worker", "tercet_shared.config", "WorkerSettings"),
    ("chat", "talk to a server from this terminal", "tercet_tools.chat.settings", "ChatSettings"),
    (
        "doctor",
        "what this machine offers, and what a model would need",
        "tercet_tools.doctor.settings",
        "DoctorSettings",
    ),
    ("bench serve", "measure servers under load", "tercet_tools.bench.settings", "BenchSettings"),
)
"""Words, summary, and where the settings are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        names: all of them, with their dashes.
        summary: one line.
        takes_value: whether a value follows.
        values: those that there are; empty where it may be anything.
        files: whether the value is a path.
        repeats: whether it may be given several times.
    """

    names: tuple[str, ...]
    summary: str
    takes_value: bool
    values: tuple[str, ...] = ()
    files: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        words: after ``tercet``.
        summary: one line.
        flags: all of them.
        files: whether a path may follow without a flag.
        values: what else may follow without a flag.
    """

    words: tuple[str, ...]
    summary: str
    flags: tuple[Flag, ...]
    files: bool = False
    values: tuple[str, ...] = ()


def commands() -> list[Command]:
    """Returns all commands. Those that need a package which is not installed have no flags."""
    found = [
        Command(
            words=tuple(words.split()),
            summary=summary,
            flags=(*(_flags(kind) if kind is not None else ()), _HELP),
            files=kind is not None and _has_positional(kind),
        )
        for words, summary, kind in ((words, summary, _load(*where)) for words, summary, *where in _SOURCES)
    ]
    found.append(Command(words=("key",), summary="make API keys", flags=(_HELP,), values=("new", "hash")))
    found.append(
        Command(
            words=("completion",), summary="print what makes a shell complete tercet", flags=(_HELP,), values=SHELLS
        )
    )
    return found


_HELP: Final = Flag(names=("--help",), summary="Show the flags and examples.", takes_value=False)


def _load(module: str, name: str) -> type[Settings] | None:
    try:
        kind: type[Settings] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return None
    return kind


def _has_positional(kind: type[Settings]) -> bool:
    field = kind.model_fields.get(_POSITIONAL)
    return field is not None and _is_positional(field.metadata)


def _is_positional(metadata: Iterable[Any]) -> bool:
    # pydantic-settings marks positional arguments with a class of this name, which it does not export.
    return any(getattr(item, "__name__", type(item).__name__) == "_CliPositionalArg" for item in metadata)


def _flags(kind: type[Settings]) -> tuple[Flag, ...]:
    shortcuts = kind.model_config.get("cli_shortcuts") or {}
    found = []
    for name, field in kind.model_fields.items():
        if name in _HIDDEN or _is_positional(field.metadata):
            continue
        kebab = name.replace("_", "-")
        more = shortcuts.get(kebab, ())
        names = [f"--{kebab}", *(f"--{short}" for short in ([more] if isinstance(more, str) else more))]
        leaves = list(_leaves(field.annotation))
        switch = bool in leaves
        found.append(
            Flag(
                names=(*names, *([f"--no-{kebab}"] if switch else [])),
                summary=" ".join((field.description or "").split()),
                takes_value=not switch,
                values=tuple(str(leaf) for leaf in leaves if isinstance(leaf, str)),
                files=Path in leaves or name.endswith("_file"),
                repeats=list in leaves,
            )
        )
    return tuple(found)


def _leaves(annotation: Any) -> Iterable[Any]:
    """Yields the types and literal values that an annotation is made of; for a list also ``list``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from _leaves(arguments[0])
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _leaves(argument)
    elif origin is list:
        yield list
        yield from _leaves(arguments[0])
    else:
        yield annotation
