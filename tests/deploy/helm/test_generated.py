"""What follows from the settings, and what is copied from docker/, is as it should be."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tercet_shared.config import CoreSettings, FrontendSettings, WorkerSettings, parse
from tests.deploy.helm.rendering import CHART, ROOT, case, of_kind
from tools import generate_settings, sync_chart


def test_pages_schema_and_flags_follow_the_settings() -> None:
    assert generate_settings.differences() == []


@pytest.mark.parametrize("kind", [FrontendSettings, CoreSettings, WorkerSettings])
def test_flags_of_the_page_exist(
    kind: type[FrontendSettings | CoreSettings | WorkerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(kind, ["--help"])
    usage = capsys.readouterr().out
    service = str(kind.model_config.get("cli_prog_name"))
    section = generate_settings.document().partition(f"`{service}`\n")[2].partition("\n## ")[0]
    flags = re.findall(r"^\| `(--[a-z-]+)` ", section, re.MULTILINE)
    assert len(flags) > 20
    assert [flag for flag in flags if f"{flag} " not in usage] == []


def _copy(target: Path) -> None:
    for path in (
        generate_settings.SCHEMA,
        generate_settings.FLAGS,
        generate_settings.VALUES,
        generate_settings.CHART_README,
        generate_settings.DOCUMENT,
    ):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target / path)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (generate_settings.DOCUMENT, "Port that the HTTP server listens on", "Port"),
        (generate_settings.SCHEMA, "Requests that run at once", "Requests"),
        (generate_settings.FLAGS, '"maxRequests"', '"maxRequest"'),
        (generate_settings.CHART_README, "Class of each pod's claim", "Class"),
        (generate_settings.VALUES, "preStopSeconds: 5", "preStopSeconds: 6"),
    ],
)
def test_a_change_by_hand_is_noticed(path: Path, old: str, new: str, tmp_path: Path) -> None:
    _copy(tmp_path)
    assert generate_settings.differences(tmp_path) == []
    text = (tmp_path / path).read_text()
    assert old in text
    (tmp_path / path).write_text(text.replace(old, new))
    expected = generate_settings.CHART_README if path == generate_settings.VALUES else path
    assert str(expected) in generate_settings.differences(tmp_path)


def test_the_page_has_every_setting_of_every_service() -> None:
    text = (ROOT / generate_settings.DOCUMENT).read_text()
    for name, kind in (("frontend", FrontendSettings), ("core", CoreSettings), ("worker", WorkerSettings)):
        section = text.partition(f"`tercet {name}`\n")[2].partition("\n## ")[0]
        rows = {line.split("|")[2].strip(" `") for line in section.splitlines() if "TERCET_" in line}
        assert rows == {
            f"TERCET_{field.upper()}" for field in kind.model_fields.keys() - generate_settings.NOT_FOR_USERS
        }


def test_dashboards_and_rules_are_those_of_docker() -> None:
    assert sync_chart.differences() == []


def test_a_copy_that_is_old_or_left_over_is_noticed(tmp_path: Path) -> None:
    for source, copies in sync_chart.COPIES.items():
        for path in (source.parent, copies):
            shutil.copytree(ROOT / path, tmp_path / path, dirs_exist_ok=True)
    assert sync_chart.differences(tmp_path) == []
    directory = tmp_path / sync_chart.RULES
    (directory / "left-over.yaml").write_text("groups: []\n")
    assert sync_chart.differences(tmp_path) == [str(sync_chart.RULES / "left-over.yaml")]
    sync_chart.write(tmp_path)
    assert sync_chart.differences(tmp_path) == []


def test_dashboards_and_rules_arrive_unchanged() -> None:
    objects = case("everything")
    maps = [
        each for each in of_kind(objects, "ConfigMap") if each["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    arrived = {name: json.loads(text) for each in maps for name, text in each["data"].items()}
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert files
    assert arrived == {f"tercet-{path.name}": json.loads(path.read_text()) for path in files}
    (rules,) = of_kind(objects, "PrometheusRule")
    files = sorted((CHART / "files" / "rules").glob("*.yaml"))
    assert files
    groups = [group for path in files for group in sync_chart.groups(path)]
    assert rules["spec"]["groups"] == groups
