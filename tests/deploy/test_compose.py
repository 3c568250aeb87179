"""`docker/compose.yaml`: valid by the published schema, hardened, in step with settings, images and configuration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema_rs
import pytest
import yaml

from tercet_shared.config import Common, CoreSettings, FrontendSettings, WorkerSettings, parse
from tests.deploy.compose_file import DOCKER, ROOT, compose, image, image_of, seconds, variables
from tests.deploy.compose_fleet import BIN

SETTINGS: dict[str, type[FrontendSettings | CoreSettings | WorkerSettings]] = {
    "frontend": FrontendSettings, "core": CoreSettings, "worker": WorkerSettings,
}  # fmt: skip
NOT_SETTINGS = {"TERCET_CACHE"}
"""Read by the worker's build of its kernels, before there are settings."""

FILE = compose()
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = {name: service for name, service in SERVICES.items() if image_of(service)}
RUNNING = {name: service for name, service in OURS.items() if name != "model"}
GROUP = "10000"


def kind_of(name: str) -> str:
    built = image_of(SERVICES[name])
    assert built is not None
    return built.entrypoint[1]


def of_kind(kind: str) -> list[str]:
    return [name for name in RUNNING if kind_of(name) == kind]


def settings_of(
    name: str, monkeypatch: pytest.MonkeyPatch, changed: Mapping[str, str] | None = None
) -> FrontendSettings | CoreSettings | WorkerSettings:
    """Returns what the service makes of its arguments and its environment, as its process does."""
    service = compose(changed)["services"][name]
    built = image_of(service)
    assert built is not None
    environment = {**built.environment, **service["environment"]}
    for variable in os.environ:
        if variable.startswith("TERCET_"):
            monkeypatch.delenv(variable)
    for variable, value in environment.items():
        if variable.startswith("TERCET_"):
            monkeypatch.setenv(variable, value)
    return parse(SETTINGS[kind_of(name)], service["command"])


def depends_on(name: str) -> set[str]:
    """Returns what the service needs, and what that needs."""
    needed = set(SERVICES[name].get("depends_on", {}))
    return needed.union(*(depends_on(other) for other in needed))


# -------------------------------------------------------------------------------------------------- the file


def schema() -> jsonschema_rs.Validator:
    (path,) = Path(check_jsonschema.__file__).parent.rglob("compose-spec.json")
    return jsonschema_rs.validator_for(json.loads(path.read_text()))


def test_it_is_valid_by_the_published_schema() -> None:
    assert [error.message for error in schema().iter_errors(FILE)] == []


def test_the_schema_does_notice_mistakes() -> None:
    wrong = compose()
    wrong["services"]["proxy"]["stop_grace_periode"] = "75s"
    assert not schema().is_valid(wrong)


def test_every_variable_is_explained_with_its_default() -> None:
    used: dict[str, str] = {}
    for variable in variables((DOCKER / "compose.yaml").read_text()):
        assert used.setdefault(variable.name, variable.default) == variable.default, variable.name
    lines = (DOCKER / ".env.example").read_text().splitlines()
    explained = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert explained == used


def test_everything_that_is_mounted_or_joined_exists() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in FILE["volumes"], (name, volume)
        assert set(service["networks"]) <= set(FILE["networks"]), name
        assert depends_on(name) <= set(SERVICES), name
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert set(FILE["volumes"]) <= mounted


def test_images_are_pinned() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+\.\d+\.\d+(-[a-z0-9]+)?$", service["image"]), name
    version = tomllib.loads((ROOT / "shared/pyproject.toml").read_text())["project"]["version"]
    assert {service["image"].partition(":")[2].removesuffix("-cuda") for service in OURS.values()} == {version}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    limits = service["deploy"]["resources"]["limits"]
    assert limits["memory"]
    assert limits["pids"]
    assert service["logging"]["options"]["max-size"]


def test_only_the_proxy_and_grafana_are_published_and_only_on_this_machine_by_default() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(ports) == {"proxy", "grafana"}
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)
    assert {name for name in FILE["networks"] if not (FILE["networks"][name] or {}).get("internal")} == {"public"}
    assert {name for name, service in SERVICES.items() if "public" in service["networks"]} == {
        "proxy", "grafana", "model",
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- our services


@pytest.mark.parametrize("name", RUNNING)
def test_arguments_and_environment_are_settings_of_the_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(name, monkeypatch)
    fields = {f"TERCET_{field.upper()}" for field in type(settings).model_fields}
    built = image_of(SERVICES[name])
    assert built is not None
    given = {key for key in {**built.environment, **SERVICES[name]["environment"]} if key.startswith("TERCET_")}
    assert given - NOT_SETTINGS <= fields
    assert settings.metrics_port == 9100
    assert settings.log_format == "json"
    assert settings.otlp_endpoint == "http://collector:4317"


def test_a_variable_reaches_the_services_that_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"TERCET_MODEL": "/models/a.gguf", "TERCET_MAX_MODEL_LEN": "512", "TERCET_API_KEY": "one,two"}
    core = settings_of("core-1", monkeypatch, changed)
    assert isinstance(core, CoreSettings)
    assert (core.model, core.max_model_len) == ("/models/a.gguf", 512)
    worker = settings_of("worker-2", monkeypatch, changed)
    assert isinstance(worker, WorkerSettings)
    assert (worker.model, worker.max_model_len) == ("/models/a.gguf", 512)
    frontend = settings_of("frontend-2", monkeypatch, changed)
    assert isinstance(frontend, FrontendSettings)
    assert frontend.api_key == ["one", "two"]
    assert compose(changed)["services"]["model"]["command"] == ["/models/a.gguf", ""]


@pytest.mark.parametrize("name", RUNNING)
def test_the_grace_is_longer_than_the_drain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(name, monkeypatch)
    stop = seconds(SERVICES[name]["stop_grace_period"])
    if isinstance(settings, WorkerSettings):  # has nothing to drain: its core ends before it
        assert stop >= 10
        return
    delay = settings.drain_delay if isinstance(settings, FrontendSettings) else 0.0
    assert settings.grace > Common.model_fields["grace"].default
    assert stop >= delay + settings.grace + 5


def test_the_proxy_waits_for_what_the_front_ends_may_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"^\s*grace_period (\w+)$", (DOCKER / "caddy/Caddyfile").read_text(), re.MULTILINE)
    assert found is not None
    grace = max(settings_of(name, monkeypatch).grace for name in of_kind("frontend"))
    assert grace < seconds(found[1]) < seconds(SERVICES["proxy"]["stop_grace_period"])


def test_what_stops_first_still_has_what_it_needs() -> None:
    """Compose stops a service before those that it depends on."""
    frontends, cores = set(of_kind("frontend")), set(of_kind("core"))
    assert frontends <= depends_on("proxy")
    for name in frontends:
        assert cores | {"valkey"} <= depends_on(name)
    for name in cores:
        (worker,) = {other for other in depends_on(name) if kind_of_ours(other) == "worker"}
        assert "valkey" in depends_on(name)
        assert not depends_on(worker) & (cores | frontends)
    assert SERVICES["frontend-1"]["depends_on"]["core-gpu"]["required"] is False


def kind_of_ours(name: str) -> str:
    return kind_of(name) if name in RUNNING else ""


def test_a_pair_shares_a_directory_that_is_the_cores_and_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: dict[str, set[str]] = {}
    for name in (*of_kind("core"), *of_kind("worker")):
        settings = settings_of(name, monkeypatch)
        assert isinstance(settings, CoreSettings | WorkerSettings)
        (volume,) = (v.split(":")[0] for v in SERVICES[name]["volumes"] if v.split(":")[1] == str(settings.link.parent))
        pairs.setdefault(volume, set()).add(kind_of(name))
        options = FILE["volumes"][volume]["driver_opts"]
        uid = image(DOCKER / "core.Dockerfile").user.split(":")[0]
        assert options["type"] == "tmpfs"
        assert f"uid={uid},gid={GROUP},mode=0750" in options["o"]
    assert all(kinds == {"core", "worker"} for kinds in pairs.values())
    assert len(pairs) == 3


def test_cores_are_found_at_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in of_kind("core"):
        settings = settings_of(name, monkeypatch)
        assert isinstance(settings, CoreSettings)
        assert settings.advertise == f"{name}:{settings.listen.rpartition(':')[2]}"
        assert settings.core_id == name
        assert settings.redis_url == "redis://valkey:6379/0"


@pytest.mark.parametrize("name", RUNNING)
def test_health_is_asked_where_it_is_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(name, monkeypatch)
    port = settings.port if isinstance(settings, FrontendSettings) else settings.metrics_port
    assert SERVICES[name]["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/readyz"
    built = image_of(SERVICES[name])
    assert built is not None
    assert f"http://127.0.0.1:{port}/livez" in built.health


def test_the_gpu_profile_reserves_a_device_and_takes_another_torch() -> None:
    assert {name for name, service in SERVICES.items() if service.get("profiles")} == {"core-gpu", "worker-gpu"}
    worker = SERVICES["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert worker["build"]["args"]["DEVICE"] == "cuda"
    assert SERVICES["worker-1"]["build"]["args"]["DEVICE"] == "cpu"


def test_only_the_download_writes_to_the_models_and_has_the_token() -> None:
    writers = {
        name for name, service in SERVICES.items() if any(v.endswith(":/models") for v in service.get("volumes", ()))
    }
    assert writers == {"model"}
    assert {name for name, service in SERVICES.items() if "HF_TOKEN" in service.get("environment", {})} == {"model"}
    assert all(service["environment"]["HF_HUB_OFFLINE"] == "1" for service in RUNNING.values())


# -------------------------------------------------------------------------------------------------- what is beside them


def test_prometheus_scrapes_every_service(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus/prometheus.yaml").read_text())
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    for kind in SETTINGS:
        job = jobs[f"tercet-{kind}"]
        static = {target for group in job["static_configs"] for target in group["targets"]}
        looked_up = {f"{name}:{each['port']}" for each in job.get("dns_sd_configs", ()) for name in each["names"]}
        always = {name for name in of_kind(kind) if not SERVICES[name].get("profiles")}
        port = settings_of(of_kind(kind)[0], monkeypatch).metrics_port
        assert static == {f"{name}:{port}" for name in always}
        assert looked_up == {f"{name}:{port}" for name in set(of_kind(kind)) - always}
    others = {t.split(":")[0] for j in jobs.values() for g in j["static_configs"] for t in g["targets"]}
    assert others - {"127.0.0.1"} <= set(SERVICES)


def test_the_proxy_knows_every_front_end() -> None:
    assert set(SERVICES["proxy"]["environment"]["TERCET_FRONTENDS"].split()) == {
        f"{name}:8000" for name in of_kind("frontend")
    }


def test_the_proxys_configuration_is_accepted_by_caddy(tmp_path: Path) -> None:
    environment = {**SERVICES["proxy"]["environment"], "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [BIN / "caddy", "validate", "--config", DOCKER / "caddy/Caddyfile", "--adapter", "caddyfile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The official image's own command; the name of the file is the one that it looks for.
    assert "command" not in SERVICES["proxy"]
    assert "./caddy:/etc/caddy:ro" in SERVICES["proxy"]["volumes"]


COLLECTOR_COMPONENTS = {
    "receivers": {"otlp"},
    "processors": {"memory_limiter", "attributes", "batch"},
    "exporters": {"otlp", "nop"},
    "extensions": {"health_check"},
}
"""Components of the collector's contrib distribution that we use, by their type."""


def test_the_collectors_configuration_is_of_known_components_that_are_all_used() -> None:
    configuration = yaml.safe_load((DOCKER / "collector/config.yaml").read_text())
    service = configuration["service"]
    for section, known in COLLECTOR_COMPONENTS.items():
        defined = set(configuration[section])
        assert {name.partition("/")[0] for name in defined} == known
        used = set(service.get(section, ()))
        used |= {name for pipeline in service["pipelines"].values() for name in pipeline.get(section, ())}
        assert defined == used
    for pipeline in service["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"
    assert service["pipelines"]["traces"]["processors"][-1] == "batch"
    assert configuration["exporters"]["otlp/tempo"]["endpoint"] == "tempo:4317"
    assert set(service["pipelines"]) == {"traces", "metrics"}  # what our services send


@pytest.mark.parametrize("page", ["compose", "runbook", "sizing"])
def test_the_operators_pages_name_settings_that_exist(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    fields = {field for kind in SETTINGS.values() for field in kind.model_fields}
    explained = {line.split("=")[0] for line in (DOCKER / ".env.example").read_text().splitlines()}
    assert set(re.findall(r"TERCET_\w+", text)) <= explained | {f"TERCET_{field.upper()}" for field in fields}
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)}
    assert {flag.removeprefix("no_") for flag in flags} <= fields
    for link in re.findall(r"\]\(([^)#h][^)#]*)", text):
        assert (ROOT / "docs" / link).exists(), link
