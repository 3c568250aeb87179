"""The PromQL of dashboards and alert rules, and what it asks for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import yaml

from tests.deploy.compose_file import DOCKER

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARDS = sorted((DOCKER / "grafana/dashboards").glob("*.json"))
RULES = sorted((DOCKER / "prometheus/rules").glob("*.yaml"))

_MACROS = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "10s"}
_CHILDREN = ("expr", "lhs", "rhs", "param", "vector_selector", "args")


@dataclass
class Query:
    """One expression.

    Attributes:
        where: dashboard and panel, or the alert.
        text: as Prometheus gets it.
        legend: names of labels that the legend or the annotations show.
        variables: of the dashboard that it uses.
    """

    where: str
    text: str
    legend: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in DASHBOARDS}


def rules() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[Query]:
    """Yields all of them."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                yield _of_grafana(f"{name}: {panel['title']}", target["expr"], legend)
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                text, _, label = variable["query"]["query"].removeprefix("label_values(").rpartition(", ")
                yield _of_grafana(f"{name}: ${variable['name']}", text, {label.rstrip(")")})
    for rule in rules():
        texts = " ".join(rule["annotations"].values())
        yield Query(rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", texts)))


def _of_grafana(where: str, text: str, legend: set[str]) -> Query:
    for macro, value in _MACROS.items():
        text = text.replace(macro, value)
    return Query(where, re.sub(r"\$(\w+)", ".*", text), legend, set(re.findall(r"\$(\w+)", text)))


def nodes(node: Any) -> Iterator[Any]:
    """Yields a parsed expression and everything in it."""
    yield node
    for name in _CHILDREN:
        below = getattr(node, name, None)
        for child in below if isinstance(below, list | tuple) else [below]:
            if child is not None and not isinstance(child, str | int | float):
                yield from nodes(child)


def selectors(text: str) -> list[promql_parser.VectorSelector]:
    """Returns what an expression selects. Raises ValueError when it is no PromQL."""
    return [node for node in nodes(promql_parser.parse(text)) if isinstance(node, promql_parser.VectorSelector)]


def grouped(text: str) -> Iterator[tuple[set[str], set[str]]]:
    """Yields for each aggregation the labels that it keeps and the names of what it is over."""
    for node in nodes(promql_parser.parse(text)):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            below = {each.name for each in nodes(node.expr) if isinstance(each, promql_parser.VectorSelector)}
            yield set(node.modifier.labels), below


def path_of_runbook(url: str) -> tuple[Path, str]:
    """Returns file and anchor of an annotation's ``runbook_url``."""
    path, _, anchor = url.partition("#")
    return Path(path), anchor
