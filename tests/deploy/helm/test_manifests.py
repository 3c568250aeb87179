"""Kubernetes would take every manifest, and each is safe by itself: over a matrix of values."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

import pytest
from helm_python import lint

from tercet_shared.config import CoreSettings, FrontendSettings, WorkerSettings, parse
from tests.deploy.helm.rendering import (
    CASES,
    CHART,
    Object,
    all_containers,
    case,
    containers,
    named,
    of_kind,
    pods,
    render_files,
)
from tests.deploy.helm.schemas import NEWEST, OLDEST, complaints

SERVICES: dict[str, Any] = {"frontend": FrontendSettings, "core": CoreSettings, "worker": WorkerSettings}


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return case(request.param)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_it(objects: list[Object], version: str) -> None:
    found = {f"{each['kind']} {each['metadata']['name']}": complaints(each, version) for each in objects}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_every_kind_is_made_somewhere() -> None:
    assert {each["kind"] for name in CASES for each in case(name)} == {
        "ConfigMap", "Deployment", "HTTPRoute", "HorizontalPodAutoscaler", "Ingress", "LeaderWorkerSet",
        "NetworkPolicy", "Pod", "PodDisruptionBudget", "PrometheusRule", "ScaledObject", "Service", "ServiceAccount",
        "ServiceMonitor", "StatefulSet",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "livenessProb")),
        ("ServiceMonitor", ("spec", "endpoints", 0, "intervall")),
        ("ScaledObject", ("spec", "minReplicas")),
        ("HTTPRoute", ("spec", "rules", 0, "timeout")),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "sizes")),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containerz")),
    ],
)
def test_the_check_notices_a_field_that_does_not_exist(kind: str, path: tuple[str | int, ...]) -> None:
    document = copy.deepcopy(of_kind([*case("everything"), *case("groups")], kind)[0])
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = "x"
    assert len(complaints(document, NEWEST)) == 1


@pytest.mark.parametrize("name", CASES)
def test_helm_finds_nothing_to_complain_of(name: str) -> None:
    report = lint(CHART, CASES[name], strict=True, namespace="llm")
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


def test_names_are_unique_and_short_enough(objects: list[Object]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    # The pods of a StatefulSet carry its name and ten characters more in a label.
    workloads = {"Deployment", "StatefulSet", "LeaderWorkerSet"}
    assert max(len(name) for kind, name in names if kind in workloads) <= 52
    assert max(len(name) for _, name in names) <= 63


# ------------------------------------------------------------------------------------------------ what runs


def test_pods_are_locked_down(objects: list[Object]) -> None:
    for name, pod in pods(objects):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        # A Service with the name of the release would set TERCET_PORT, and the front end would not start.
        assert spec["enableServiceLinks"] is False
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]["memory"]
            assert container["resources"]["limits"]["memory"]


def test_containers_mount_what_there_is_and_write_where_they_may(objects: list[Object]) -> None:
    claims = {
        each["metadata"]["name"]: each["spec"].get("volumeClaimTemplates", [])
        for each in of_kind(objects, "StatefulSet")
    }
    for name, pod in pods(objects):
        volumes = {each["name"] for each in pod["spec"].get("volumes", [])}
        volumes |= {each["metadata"]["name"] for each in claims.get(name, [])}
        mounted = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])}
        assert mounted == volumes, name
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths))
            if container["command"][0] == "tercet":
                assert {"/tmp", "/var/cache/tercet"} <= set(paths)


def test_ports_of_a_pod_are_not_used_twice(objects: list[Object]) -> None:
    for _, pod in pods(objects):
        ports = [port for each in containers(pod) for port in each.get("ports", [])]
        assert len({port["containerPort"] for port in ports}) == len({port["name"] for port in ports}) == len(ports)


def _reach(probe: Object) -> float:
    return float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


def test_startup_readiness_and_liveness_ask_differently(objects: list[Object]) -> None:
    for name, container in all_containers(objects).items():
        if name.endswith("/ask"):
            continue
        started, ready, live = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
        actions = [{key: probe.get(key) for key in ("httpGet", "grpc", "tcpSocket", "exec")} for probe in (ready, live)]
        assert actions[0] != actions[1], name
        # Who is not ready loses requests at once; who seems dead is killed, for which there is more time.
        assert _reach(ready) < _reach(live), name
        assert _reach(started) > _reach(ready), name


def test_probes_ask_where_something_answers(objects: list[Object]) -> None:
    for name, container in all_containers(objects).items():
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for kind in ("startup", "readiness", "liveness"):
            probe = container.get(f"{kind}Probe", {})
            for action in ("httpGet", "tcpSocket"):
                if action in probe:
                    assert probe[action]["port"] in ports, name
            if "grpc" in probe:
                assert probe["grpc"]["port"] in ports.values(), name
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] == (
                    "/readyz" if kind == "readiness" or (name.endswith("/core") and kind == "startup") else "/livez"
                )


def test_the_kubelet_asks_no_grpc_where_it_would_need_a_certificate() -> None:
    plain, tls = (all_containers(case(name))["prod-tercet-smollm2/core"] for name in ("defaults", "mtls"))
    assert plain["readinessProbe"]["grpc"] == {"port": 8100}
    assert plain["livenessProbe"]["grpc"] == {"port": 8100, "service": "liveness"}
    assert tls["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert tls["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}


def test_https_is_asked_for_by_https() -> None:
    frontend = all_containers(case("everything"))["tercet-frontend/frontend"]
    assert frontend["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert frontend["livenessProbe"]["httpGet"].get("scheme", "HTTP") == "HTTP"  # the port of metrics


def _settings(container: Object, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parses a container's command line and environment as the service would."""
    program, service = container["command"]
    assert program == "tercet"
    environment = {each["name"]: each.get("value", "1") for each in container["env"]}
    for name, value in environment.items():
        if name.startswith("TERCET_"):
            monkeypatch.setenv(name, value)
    settings = parse(SERVICES[service], [arg.replace("$(LWS_WORKER_INDEX)", "1") for arg in container["args"]])
    for name in environment:
        monkeypatch.delenv(name, raising=False)
    return settings


def test_commands_are_what_the_services_understand(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, container in all_containers(objects).items():
        if container["command"][0] != "tercet":
            continue
        settings = _settings(container, monkeypatch)
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        metrics = next(port for port_name, port in ports.items() if port_name.endswith("metrics"))
        assert settings.metrics_port == metrics, name
        if name.endswith("/frontend"):
            assert settings.port == ports["http"]
        if name.endswith("/core"):
            assert settings.listen.endswith(f":{ports['grpc']}")
            assert settings.advertise.endswith(f":{ports['grpc']}")


def test_there_is_more_time_to_end_than_what_the_services_take(
    objects: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pod in pods(objects):
        for container in pod["spec"]["containers"]:
            if container["command"][0] != "tercet":
                continue
            settings = _settings(container, monkeypatch)
            before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            grace = 0 if container["name"] == "worker" else settings.grace  # requests are the core's
            needed = before + getattr(settings, "drain_delay", 0) + grace
            assert pod["spec"]["terminationGracePeriodSeconds"] >= math.ceil(needed) + 5, name


def test_the_worker_starts_before_its_core_and_outlives_it(objects: list[Object]) -> None:
    engines = [
        pod for _, pod in pods(objects) if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "engine"
    ]
    assert engines
    for pod in engines:
        (worker,) = pod["spec"]["initContainers"]
        (core,) = pod["spec"]["containers"]
        assert (worker["name"], worker["restartPolicy"]) == ("worker", "Always")
        # The next container starts when this probe succeeds, so it must not depend on the core.
        assert worker["startupProbe"]["httpGet"]["path"] == "/livez"
        links = {next(arg for arg in each["args"] if arg.startswith("--link=")) for each in (worker, core)}
        assert len(links) == 1
        run = next(each["mountPath"] for each in core["volumeMounts"] if each["name"] == "run")
        # Kubernetes makes the volume writable by everyone; the core makes a folder in it that is not.
        assert links.pop() == f"--link={run}/link/worker.sock"


def test_front_ends_find_a_model_where_its_core_says_it_is(objects: list[Object]) -> None:
    def mounts(container: Object) -> dict[str, Object]:
        return {each["mountPath"]: each for each in container["volumeMounts"]}

    (frontend,) = (each for name, each in all_containers(objects).items() if name.endswith("-frontend/frontend"))
    for name, container in all_containers(objects).items():
        if not name.endswith(("/core", "/worker")):
            continue
        for path, mount in mounts(container).items():
            if mount["name"] == "model":
                assert mount["readOnly"]
                assert mounts(frontend)[path].get("subPath") == mount.get("subPath")
    models = [pod for _, pod in pods(objects) if "initContainers" in pod["spec"]]
    for pod in models:
        worker, core = pod["spec"]["initContainers"][0], pod["spec"]["containers"][0]
        assert f"--model={worker['args'][-1]}" in core["args"]


# ------------------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize(("name", "nodes", "tensor", "pipeline"), [("large", 2, 4, 2), ("huge", 4, 2, 4)])
def test_a_model_on_several_nodes_is_a_group_that_falls_as_one(
    name: str, nodes: int, tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = case("groups")
    group = named(objects, "LeaderWorkerSet", f"prod-tercet-{name}")["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (nodes, "RecreateGroupOnPodRestart")
    found = all_containers(objects)
    leader, worker = found[f"prod-tercet-{name}/worker"], found[f"prod-tercet-{name}-workers/worker"]
    assert [each["name"] for each in group["workerTemplate"]["spec"]["containers"]] == ["worker"]
    assert leader["resources"] == worker["resources"]
    first, other = (_settings(each, monkeypatch) for each in (leader, worker))
    for each in (first, other):
        assert (each.nodes, each.tensor_parallel_size, each.pipeline_parallel_size) == (nodes, tensor, pipeline)
        assert each.rendezvous_timeout == (60 if name == "huge" else 1800)
    assert (first.node_rank, first.core_address, first.rendezvous) == (0, None, "$(POD_IP):8200")
    assert (other.node_rank, other.core_address) == (1, "$(LWS_LEADER_ADDRESS):8100")
    assert other.rendezvous == "$(LWS_LEADER_ADDRESS):8200"
    assert other.mtls_cert is not None
    assert first.mtls_cert is None  # its core is at the end of a socket


def test_ranks_of_one_pod_divide_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = all_containers(case("groups"))
    (threads,) = [each for each in found["prod-tercet-large/worker"]["env"] if each["name"] == "TERCET_THREADS"]
    assert threads["value"] == "2"  # eight, for four ranks
    wide = _settings(found["prod-tercet-wide/worker"], monkeypatch)
    assert (wide.tensor_parallel_size, wide.nodes, wide.rendezvous) == (2, 1, None)


# ------------------------------------------------------------------------------------------------ secrets


def test_secrets_are_only_referred_to(objects: list[Object]) -> None:
    assert of_kind(objects, "Secret") == []
    for name, container in all_containers(objects).items():
        for each in container.get("env", []):
            if re.search("PASSWORD|TOKEN|KEY|AUTH", each["name"]):
                assert set(each) == {"name", "valueFrom"}, name
                assert set(each["valueFrom"]) == {"secretKeyRef"}
        assert not any("redis-url" in arg or arg.startswith(("--redis-url", "--api-key=")) for arg in container["args"])


def test_each_secret_gets_where_it_is_needed() -> None:
    objects = case("everything")
    referred: dict[str, set[str]] = {}
    for name, pod in pods(objects):
        for volume in pod["spec"].get("volumes", []):
            if "secret" in volume:
                referred.setdefault(volume["secret"]["secretName"], set()).add(name)
                assert volume["secret"]["defaultMode"] == 0o440
        for container in containers(pod):
            for each in container.get("env", []):
                if "secretKeyRef" in each.get("valueFrom", {}):
                    referred.setdefault(each["valueFrom"]["secretKeyRef"]["name"], set()).add(
                        f"{name}/{container['name']}"
                    )
    cores = {"tercet-llama/core", "tercet-smollm2/core"}
    workers = {"tercet-llama/worker", "tercet-smollm2/worker"}
    assert referred == {
        "keys": {"tercet-frontend"},
        "public": {"tercet-frontend"},
        "clients": {"tercet-frontend"},
        "inside": {"tercet-frontend", "tercet-llama", "tercet-smollm2"},
        "redis": {"tercet-frontend/frontend", "tercet-redis/redis", *cores},
        "hub": {"tercet-frontend/frontend", *cores, *workers},
        "test-key": {"tercet-test/ask"},
    }


def test_the_certificates_of_the_inside_are_not_the_workers() -> None:
    pod = named(case("mtls"), "Deployment", "prod-tercet-smollm2")["spec"]["template"]
    by_name = {each["name"]: {mount["name"] for mount in each["volumeMounts"]} for each in containers(pod)}
    assert "mtls" in by_name["core"]
    assert "mtls" not in by_name["worker"]


# ------------------------------------------------------------------------------------------------ details


def test_numbers_and_switches_reach_the_command_line_as_they_were_given() -> None:
    args = all_containers(case("everything"))["tercet-frontend/frontend"]["args"]
    assert "--max-requests=1000000" in args  # not 1e+06
    assert "--drain-delay=4.2" in args
    assert "--no-chat-page" in args
    assert [arg for arg in args if arg.startswith("--cors-origin")] == [
        "--cors-origin=https://a",
        "--cors-origin=https://b",
    ]


def test_settings_go_to_those_who_know_them() -> None:
    core, worker = (
        all_containers(case("two models"))[f"prod-tercet-llama/{name}"]["args"] for name in ("core", "worker")
    )
    assert "--no-prefix-caching" in core
    assert not any("prefix-caching" in arg for arg in worker)
    assert "--kv-cache-memory=8GiB" in worker
    assert not any("kv-cache-memory" in arg for arg in core)
    assert "--max-num-seqs=64" in core
    assert "--max-num-seqs=64" in worker


def test_a_limit_of_processor_time_sets_the_threads() -> None:
    def threads(container: Object) -> list[Object]:
        return [each for each in container["env"] if each["name"] == "TERCET_THREADS"]

    (limited,) = threads(all_containers(case("gpu"))["prod-tercet-llama/worker"])
    assert limited["valueFrom"] == {"resourceFieldRef": {"containerName": "worker", "resource": "limits.cpu"}}
    assert threads(all_containers(case("defaults"))["prod-tercet-smollm2/worker"]) == []


def test_addresses_in_both_families() -> None:
    four, six = (all_containers(case(name))["prod-tercet-smollm2/core"]["args"] for name in ("defaults", "ipv6"))
    assert "--advertise=$(POD_IP):8100" in four
    assert "--advertise=[$(POD_IP)]:8100" in six
    assert "--listen=[::]:8100" in six


def test_images() -> None:
    objects = case("everything")
    images = {name: each["image"] for name, each in all_containers(objects).items()}
    assert images["tercet-frontend/frontend"] == "registry.example.com/llm/tercet-frontend:0.1.0"
    assert images["tercet-smollm2/core"] == "registry.example.com/llm/tercet-core@sha256:" + "0" * 64
    assert all_containers(case("gpu"))["prod-tercet-llama/worker"]["image"] == "tercet-worker-cuda:0.1.0"


def test_long_streams_pass_the_ingress_and_the_gateway() -> None:
    objects = case("everything")
    (ingress,) = of_kind(objects, "Ingress")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600
    (route,) = of_kind(objects, "HTTPRoute")
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_the_notes_say_what_is_open_and_stop_when_it_is_closed() -> None:
    def notes(name: str) -> str:
        (text,) = (text for path, text in render_files(CASES[name]).items() if path.endswith("NOTES.txt"))
        return text

    assert "frontend.apiKeys.secretName" in notes("defaults")
    assert "rollout status deployment/prod-tercet-smollm2" in notes("defaults")
    assert "rollout status statefulset/prod-tercet-own" in notes("claims")
    assert "wait leaderworkerset/prod-tercet-large --for=condition=Available" in notes("groups")
    for value in ("frontend.apiKeys", "mtls.secretName", "passwordSecret", "networkPolicy.enabled", "Nobody watches"):
        assert value not in notes("everything")


def test_what_is_said_of_everything_is_on_everything() -> None:
    for each in case("everything"):
        assert each["metadata"]["labels"]["team"] == "research"
        assert each["metadata"]["annotations"]["example.com/owner"] == "research"
        assert each["metadata"]["namespace"] == "llm"


def test_a_new_version_of_the_chart_alone_replaces_no_pod() -> None:
    for _, pod in pods(case("everything")):
        if "containers" in pod.get("spec", {}) and pod.get("kind") != "Pod":
            assert "helm.sh/chart" not in json.dumps(pod["metadata"])
