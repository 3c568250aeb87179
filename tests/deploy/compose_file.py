"""Reads `docker/compose.yaml` as Compose does, and the parts of a Dockerfile that say how its image is run."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<kind>:?-)(?P<default>[^}]*))?\})")


@dataclass(frozen=True)
class Variable:
    """A variable of the file: what it is when nobody sets it, and whether being set to nothing is the same."""

    name: str
    default: str
    empty_is_unset: bool


def variables(text: str) -> Iterator[Variable]:
    for found in _VARIABLE.finditer(text):
        if found["name"]:
            yield Variable(found["name"], found["default"] or "", found["kind"] == ":-")


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """Replaces variables by the rules of Compose (``${NAME:-default}``, ``${NAME-default}``, ``$$``)."""

    def value(found: re.Match[str]) -> str:
        if not found["name"]:
            return "$"
        given = environment.get(found["name"])
        unset = given is None or (found["kind"] == ":-" and not given)
        return (found["default"] or "") if unset else str(given)

    return _VARIABLE.sub(value, text)


def compose(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the file with its variables replaced: those of ``environment``, else their defaults."""

    def replaced(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: replaced(value) for key, value in node.items()}
        if isinstance(node, list):
            return [replaced(item) for item in node]
        return interpolate(node, environment or {}) if isinstance(node, str) else node

    loaded: dict[str, Any] = replaced(yaml.safe_load((DOCKER / "compose.yaml").read_text()))
    return loaded


@dataclass
class Image:
    """How the last stage of a Dockerfile is run."""

    entrypoint: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    stop_signal: str = ""
    health: str = ""
    labels: dict[str, str] = field(default_factory=dict)


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Yields instruction and argument, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def image(dockerfile: Path) -> Image:
    """Returns how the image is run that ``dockerfile`` makes."""
    last = Image()
    for name, rest in instructions(dockerfile):
        if name == "FROM":
            last = Image()
        elif name == "ENTRYPOINT":
            last.entrypoint = json.loads(rest)
        elif name in ("ENV", "LABEL"):
            pairs = dict(pair.split("=", 1) for pair in shlex.split(rest))
            (last.environment if name == "ENV" else last.labels).update(pairs)
        elif name == "USER":
            last.user = rest
        elif name == "STOPSIGNAL":
            last.stop_signal = rest
        elif name == "HEALTHCHECK":
            last.health = rest
    return last


def image_of(service: Mapping[str, Any]) -> Image | None:
    """Returns the image of one of our services; None for others, which are not built here."""
    build = service.get("build")
    return None if build is None else image(ROOT / build["dockerfile"])


def seconds(text: str) -> float:
    """Returns a duration such as ``75s`` or ``1m30s``."""
    parts = re.findall(r"(\d+)(h|m|s)", text)
    assert "".join(number + unit for number, unit in parts) == text
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)
