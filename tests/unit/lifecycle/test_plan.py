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
    assert (frontend.model, frontend.port, frontend.log_level) == (["model"], 9000, "debug")
    assert (core.model, core.pipeline_depth, core.max_num_seqs) == ("model", 3, 8)
    assert (worker.model, worker.dtype, worker.max_num_seqs) == ("model", "float32", 8)
    assert frontend.core == [core.listen] == ["unix:/run/x/engine.sock"]
    assert core.link == worker.link == RUN / "link.sock"


def test_a_redis_is_for_responses_and_quotas_alone() -> None:
    made = plan(environ={"TERCET_REDIS_URL": "redis://x", "HOME": "/h"})
    assert "TERCET_REDIS_URL" in child(made, "front end").env
    assert "TERCET_REDIS_URL" not in child(made, "core").env
    assert not parse(FrontendSettings, list(child(made, "front end").argv[3:])).discover_cores


def test_keys_travel_in_the_environment_of_the_front_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--api-key=sesame", "--api-key=open", environ={"HOME": "/h"})
    assert made.api_key == "sesame"
    assert not any("sesame" in argument for spec in made.children for argument in spec.argv)
    assert [name for name in ("core", "worker") if "TERCET_API_KEY" in child(made, name).env] == []
    front = child(made, "front end")
    monkeypatch.setenv("TERCET_API_KEY", front.env["TERCET_API_KEY"])
    assert parse(FrontendSettings, list(front.argv[3:])).api_key == ["sesame", "open"]


def test_several_front_ends_share_a_socket_and_are_started_again() -> None:
    made = plan("--frontends=3").holding(5).sharing(7)
    assert [spec.name for spec in made.children] == ["front end 1", "front end 2", "front end 3", "core", "worker"]
    fronts = made.children[:3]
    assert {spec.role for spec in fronts} == {made.frontend}
    parsed = [parse(FrontendSettings, list(spec.argv[3:])) for spec in fronts]
    assert [settings.process_socket for settings in parsed] == [RUN / f"http{number}.sock" for number in (1, 2, 3)]
    assert [settings.listen_fd for settings in parsed] == [7, 7, 7]
    # The first answers /livez and /readyz from the beginning on; one that is started again has the others for that.
    assert [settings.accept_when_ready for settings in parsed] == [False, True, True]
    for spec in fronts:
        assert spec.holds == (5, 7)
        assert spec.restart is not None
        again = spec.restarted()
        assert parse(FrontendSettings, list(again.argv[3:])).accept_when_ready
        assert again.restarted() == again
    core, worker = made.children[3:]
    assert (core.holds, worker.holds) == ((5,), (5,))
    assert not any("--listen-fd" in argument for spec in (core, worker) for argument in spec.argv)


def test_the_only_front_end_opens_its_own_socket() -> None:
    front = child(plan(), "front end")
    settings = parse(FrontendSettings, list(front.argv[3:]))
    assert (settings.listen_fd, settings.process_socket, settings.accept_when_ready) == (None, None, False)
    assert front.restart is None


def test_a_flag_beats_a_variable_in_the_children_too() -> None:
    # --port 8000 is the default, so it is not on the child's command line; the variable must not reach the child.
    environ = {"TERCET_PORT": "9000", "tercet_dtype": "float32", "TERCET_WORKER_TIMEOUT": "5", "PATH": "/bin"}
    made = plan("--port=8000", environ=environ)
    for spec in made.children:
        assert dict(spec.env) == {"TERCET_WORKER_TIMEOUT": "5", "PATH": "/bin"}


def test_what_the_front_end_asks_for_is_known() -> None:
    assert (plan().needs_key, plan().tls) == (False, False)
    assert plan("--api-key=sesame").needs_key
    made = plan("--api-keys-file=keys.toml", "--tls-cert=c.pem", "--tls-key=k.pem")
    assert (made.needs_key, made.api_key, made.tls) == (True, None, True)
