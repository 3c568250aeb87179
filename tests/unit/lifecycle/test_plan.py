from __future__ import annotations

from pathlib import Path

import pytest

from tercet_shared.config import CoreSettings, FrontendSettings, ServeSettings, WorkerSettings, parse
from tercet_shared.lifecycle.plan import ChildSpec, Plan, plan_serve

RUN = Path("/run/x")


def plan(*argv: str, environ: dict[str, str] | None = None) -> Plan:
    return plan_serve(parse(ServeSettings, [*argv, "model"]), RUN, environ or {})


def child(plan: Plan, name: str) -> ChildSpec:
    return next(spec for spec in plan.children if spec.name == name)


def test_each_service_gets_what_it_understands_and_the_addresses_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--port=9000", "--dtype=float32", "--pipeline-depth=3", "--max-num-seqs=8", "--log-level=debug")
    modules = [spec.argv[1:3] for spec in made.children]
    assert modules == [("-m", "tercet_frontend"), ("-m", "tercet_core"), ("-m", "tercet_worker")]
    frontend = parse(FrontendSettings, list(child(made, "front end").argv[3:]))
    core = parse(CoreSettings, list(child(made, "core").argv[3:]))
    worker = parse(WorkerSettings, list(child(made, "worker").argv[3:]))
    assert (frontend.model, frontend.port, frontend.log_level) == ("model", 9000, "debug")
    assert (core.pipeline_depth, core.max_num_seqs) == (3, 8)
    assert (worker.model, worker.dtype, worker.max_num_seqs) == ("model", "float32", 8)
    assert frontend.core == [core.listen] == ["unix:/run/x/engine.sock"]
    assert core.link == worker.link == RUN / "link.sock"


def test_keys_travel_in_the_environment_of_the_front_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--api-key=sesame", "--api-key=open", environ={"HOME": "/h"})
    assert made.api_key == "sesame"
    assert not any("sesame" in argument for spec in made.children for argument in spec.argv)
    assert [name for name in ("core", "worker") if "TERCET_API_KEY" in child(made, name).env] == []
    front = child(made, "front end")
    monkeypatch.setenv("TERCET_API_KEY", front.env["TERCET_API_KEY"])
    assert parse(FrontendSettings, list(front.argv[3:])).api_key == ["sesame", "open"]


def test_a_flag_beats_a_variable_in_the_children_too() -> None:
    # --port 8000 is the default, so it is not on the child's command line; the variable must not reach the child.
    environ = {"TERCET_PORT": "9000", "tercet_dtype": "float32", "TERCET_WORKER_TIMEOUT": "5", "PATH": "/bin"}
    made = plan("--port=8000", environ=environ)
    for spec in made.children:
        assert dict(spec.env) == {"TERCET_WORKER_TIMEOUT": "5", "PATH": "/bin"}
