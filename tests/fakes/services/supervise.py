"""`tercet serve` as a real process with played services: ``supervise.py NOTES BASE PORT [NAME=FLAGS …]``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from tercet_shared.config import ServeSettings, parse
from tercet_shared.lifecycle.plan import ChildSpec, Plan
from tercet_shared.lifecycle.serve import run_serve

NAMES = ("front end", "core", "worker")


def played(notes: Path, run_dir: Path, env: Mapping[str, str], flags: Mapping[str, str]) -> Plan:
    """Returns a plan of three played services; ``flags`` are further flags of play.py by name."""

    def spec(name: str) -> ChildSpec:
        program = (sys.executable, str(Path(__file__).with_name("play.py")))
        always = ("--name", name, "--notes", str(notes), "--socket", str(run_dir / f"{name[:4]}.sock"))
        http = ("--http",) if name == NAMES[0] else ()
        return ChildSpec(name, (*program, *always, *http, *shlex.split(flags.get(name, ""))), env)

    return Plan(tuple(spec(name) for name in NAMES), NAMES[0], "127.0.0.1", "model")


def main() -> int:
    notes, base, port, *rest = sys.argv[1:]
    flags = dict(entry.split("=", 1) for entry in rest)
    settings = parse(ServeSettings, [f"--run-dir={base}", f"--port={port}", "model"])
    return run_serve(settings, planner=lambda _, run_dir, env: played(Path(notes), run_dir, env, flags))


if __name__ == "__main__":
    sys.exit(main())
