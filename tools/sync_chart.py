"""Copies the dashboards and alert rules of docker/ into the chart, which cannot reach outside of itself.

With ``--check`` nothing is written, and the exit status is 1 if something would be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = Path("helm/tercet/files/dashboards")
RULES = Path("helm/tercet/files/rules")
COPIES = {Path("docker/grafana/dashboards/*.json"): DASHBOARDS, Path("docker/prometheus/rules/*.yaml"): RULES}
"""Which files are copied where."""


def expected(root: Path = ROOT) -> dict[Path, bytes]:
    """Returns the content of every copy, by its path under ``root``."""
    return {
        target / path.name: path.read_bytes()
        for source, target in COPIES.items()
        for path in sorted((root / source.parent).glob(source.name))
    }


def differences(root: Path = ROOT) -> list[str]:
    """Returns the copies that are missing, changed, or of nothing any more."""
    wanted = expected(root)
    present = {
        path.relative_to(root): path.read_bytes()
        for source, target in COPIES.items()
        for path in (root / target).glob(source.name)
    }
    return sorted(str(path) for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))


def write(root: Path = ROOT) -> None:
    """Makes the copies what they should be."""
    wanted = expected(root)
    for name in differences(root):
        path = root / name
        if Path(name) in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[Path(name)])
        else:
            path.unlink()


def groups(path: Path) -> list[dict[str, Any]]:
    """Returns the groups of a file of rules."""
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text())["groups"]
    return found


def main() -> int:
    """Returns 1 if --check found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    if not parser.parse_args().check:
        write()
        return 0
    changed = differences()
    for name in changed:
        print(f"{name} is not a copy of what docker/ has: run tools/sync_chart.py", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
