"""Dashboards and alert rules: every query is PromQL for what is exported; every alert has its runbook entry."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import yaml

from tests.deploy.compose_file import DOCKER, ROOT
from tests.deploy.exported_metrics import exported
from tests.deploy.queries import RULES, Query, dashboards, grouped, path_of_runbook, queries, rules, selectors

EXPORTED = exported()
QUERIES = list(queries())
RUNBOOK = ROOT / "docs/runbook.md"


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_a_query_asks_for_what_is_exported(query: Query) -> None:
    assert problems(query) == []


def problems(query: Query) -> list[str]:
    """Returns what a query asks for that no service exports."""
    found = []
    known: set[str] = set()
    for selector in selectors(query.text):
        series = EXPORTED.get(selector.name or "")
        if series is None:
            found.append(f"nobody exports {selector.name}")
            continue
        known |= series.labels
        for matcher in selector.matchers.matchers:
            if matcher.name not in series.labels:
                found.append(f"{series.name} has no label {matcher.name}")
            if matcher.name == "job" and series.job and not re.fullmatch(matcher.value, series.job):
                found.append(f"{series.name} is not exported by {matcher.value}")
    for labels, names in grouped(query.text):
        for name in names & set(EXPORTED):
            found += [f"{name} has no label {label}" for label in labels - EXPORTED[name].labels]
    if known:
        found += [f"the legend shows {label}, which nothing has" for label in query.legend - known]
    return found


@pytest.mark.parametrize(
    ("text", "legend", "problem"),
    [
        ("rate(tercet_tokens_total[5m])", set(), "nobody exports tercet_tokens_total"),
        ('tercet_kv_blocks{status="held"}', set(), "tercet_kv_blocks has no label status"),
        ("sum by (core) (tercet_requests_running)", set(), "tercet_requests_running has no label core"),
        ("tercet_requests_running", {"core"}, "the legend shows core, which nothing has"),
    ],
)
def test_a_wrong_query_is_noticed(text: str, legend: set[str], problem: str) -> None:
    assert problems(Query("here", text, legend)) == [problem]


def test_what_is_no_promql_is_noticed() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        selectors("sum by (instance (tercet_requests_running)")


def test_every_instrument_is_on_a_dashboard() -> None:
    """What nobody can see need not be measured."""

    def instrument(name: str) -> str:
        return re.sub(r"_(bucket|sum|count)$", "", name)

    seen = {instrument(selector.name or "") for query in QUERIES for selector in selectors(query.text)}
    assert {instrument(name) for name in EXPORTED} - seen == set()


# -------------------------------------------------------------------------------------------------- dashboards


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return list(dashboard["panels"])


@pytest.mark.parametrize(("name", "dashboard"), dashboards().items())
def test_a_dashboard_is_whole(name: str, dashboard: dict[str, Any]) -> None:
    panels = panels_of(dashboard)
    assert [panel for panel, count in Counter(panel["id"] for panel in panels).items() if count > 1] == []
    for panel in panels:
        area = panel["gridPos"]
        assert 0 <= area["x"] < area["x"] + area["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
    for one, other in pairwise(sorted(panels, key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))):
        a, b = one["gridPos"], other["gridPos"]
        assert b["y"] >= a["y"] + a["h"] or b["x"] >= a["x"] + a["w"] or a["x"] >= b["x"] + b["w"], (name, one["title"])
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {variable for query in QUERIES if query.where.startswith(name) for variable in query.variables}
    assert used <= defined
    assert defined - used == {"datasource"}


def test_dashboards_have_names_of_their_own() -> None:
    uids = [dashboard["uid"] for dashboard in dashboards().values()]
    assert len(set(uids)) == len(uids) == 5


def test_latency_leads_to_traces() -> None:
    targets = [target for panel in dashboards()["latency.json"]["panels"] for target in panel.get("targets", ())]
    with_exemplars = [target["expr"] for target in targets if target.get("exemplar")]
    for metric in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert any(f"gen_ai_server_{metric}_seconds_bucket" in expr for expr in with_exemplars)
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/datasources.yaml").read_text())["datasources"]
    by_uid = {source["uid"]: source for source in sources}
    (exemplars,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    # `trace_id` is the name that the services give an exemplar's label.
    assert exemplars == {"name": "trace_id", "datasourceUid": "tempo"}
    assert by_uid["tempo"]["type"] == "tempo"


# -------------------------------------------------------------------------------------------------- alerts


def test_every_alert_has_its_entry_in_the_runbook_and_no_entry_is_left_over() -> None:
    headings = re.findall(r"^### (Tercet\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in rules())
    for rule in rules():
        path, anchor = path_of_runbook(rule["annotations"]["runbook_url"])
        assert ROOT / path == RUNBOOK
        assert anchor == rule["alert"].lower()


def test_alerts_say_what_it_is_and_how_urgent() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["summary"].endswith(".")


def test_prometheus_itself_accepts_the_rules_and_they_fire_as_meant() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed here (Debian: prometheus)")
    checked = subprocess.run([promtool, "check", "rules", *RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    fired = subprocess.run(
        [promtool, "test", "rules", ROOT / "tests/deploy/alerts.yaml"], capture_output=True, text=True, check=False
    )
    assert fired.returncode == 0, fired.stdout + fired.stderr
