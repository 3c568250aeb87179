"""What one manifest says of another is so: selectors, ports, targets, and who may reach whom."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deploy.helm.rendering import CASES, Object, all_containers, case, containers, named, of_kind, pods

WATCHED = [name for name in CASES if of_kind(case(name), "ServiceMonitor")]
GUARDED = [name for name in CASES if of_kind(case(name), "NetworkPolicy")]


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return case(request.param)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def selected(objects: list[Object], selector: dict[str, str]) -> dict[str, Object]:
    """Returns the pods that a selector finds, by the name of what they belong to."""
    return {name: pod for name, pod in pods(objects) if selects(selector, pod["metadata"]["labels"])}


def ports_of(pod: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in containers(pod) for port in each.get("ports", [])}


def test_workloads_select_their_own_pods_and_no_others(objects: list[Object]) -> None:
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        assert list(selected(objects, each["spec"]["selector"]["matchLabels"])) == [each["metadata"]["name"]]


def test_constraints_of_spread_count_their_own_pods(objects: list[Object]) -> None:
    for name, pod in pods(objects):
        for constraint in pod["spec"].get("topologySpreadConstraints", []):
            assert list(selected(objects, constraint["labelSelector"]["matchLabels"])) == [name]


def test_services_lead_to_ports_that_exist(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        (pod,) = selected(objects, service["spec"]["selector"]).values()
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(pod), service["metadata"]["name"]
            if service["spec"].get("clusterIP") == "None":  # then nothing translates
                assert port["port"] == ports_of(pod)[port["targetPort"]]


def test_each_stateful_set_has_its_service(objects: list[Object]) -> None:
    for each in of_kind(objects, "StatefulSet"):
        service = named(objects, "Service", each["spec"]["serviceName"])
        assert list(selected(objects, service["spec"]["selector"])) == [each["metadata"]["name"]]


def test_budgets_are_for_one_workload_each(objects: list[Object]) -> None:
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert len(selected(objects, budget["spec"]["selector"]["matchLabels"])) == 1


def test_scalers_scale_what_exists_and_alone(objects: list[Object]) -> None:
    targets = [each["spec"]["scaleTargetRef"] for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")]
    scaled = [named(objects, target["kind"], target["name"]) for target in targets]
    for each in of_kind(objects, "Deployment", "StatefulSet", "LeaderWorkerSet"):
        # Where both set the number, every upgrade would undo what the scaler did.
        assert ("replicas" in each["spec"]) == (each not in scaled), each["metadata"]["name"]


def test_models_scale_by_what_waits_and_by_what_runs() -> None:
    objects = case("everything")
    by_queries = named(objects, "ScaledObject", "tercet-llama")["spec"]
    labels = 'job="tercet-core",namespace="llm",tercet_release="prod",tercet_model="llama"'
    assert [trigger["metadata"]["query"] for trigger in by_queries["triggers"]] == [
        f'sum(tercet_requests_waiting{{reason="capacity",{labels}}})',
        f"sum(tercet_requests_running{{{labels}}})",
    ]
    by_pods = named(objects, "HorizontalPodAutoscaler", "tercet-smollm2")["spec"]
    assert [metric["pods"]["metric"]["name"] for metric in by_pods["metrics"]] == [
        "tercet_requests_waiting",
        "tercet_requests_running",
    ]


@pytest.mark.parametrize("name", WATCHED)
def test_every_port_of_metrics_is_read_once_with_the_labels_that_queries_use(name: str) -> None:
    objects = case(name)
    read: dict[str, set[str]] = {}
    for monitor in of_kind(objects, "ServiceMonitor"):
        services = [
            service for service in of_kind(objects, "Service")
            if selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        ]  # fmt: skip
        assert services
        for endpoint in monitor["spec"]["endpoints"]:
            given = {each["targetLabel"]: each.get("replacement") for each in endpoint["relabelings"]}
            for service in services:
                (port,) = [each for each in service["spec"]["ports"] if each["name"] == endpoint["port"]]
                (pod,) = selected(objects, service["spec"]["selector"])
                assert port["targetPort"] not in read.setdefault(pod, set())
                read[pod].add(port["targetPort"])
            assert given["tercet_release"] == "prod"
            assert given["job"] in ("tercet-frontend", "tercet-core", "tercet-worker")
            (model,) = [each for each in endpoint["relabelings"] if each["targetLabel"] == "tercet_model"]
            (source,) = model["sourceLabels"]
            if "worker" in endpoint["port"]:
                labels = [
                    re.sub("[^a-z]", "_", label) for service in services for label in service["metadata"]["labels"]
                ]
                assert source.removeprefix("__meta_kubernetes_service_label_") in labels
    for workload, pod in pods(objects):
        metrics = {port for port in ports_of(pod) if port.endswith("metrics")}
        assert read.get(workload, set()) == metrics, workload


def test_routes_lead_to_the_front_ends() -> None:
    objects = case("everything")
    (ingress,) = of_kind(objects, "Ingress")
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    (route,) = of_kind(objects, "HTTPRoute")
    (reference,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["name"], backend["port"]["number"]) == (reference["name"], reference["port"])
    service = named(objects, "Service", backend["name"])
    assert [port["port"] for port in service["spec"]["ports"]] == [backend["port"]["number"]]
    assert list(selected(objects, service["spec"]["selector"])) == ["tercet-frontend"]


def _service_of(objects: list[Object], url: str) -> Object:
    address = urlsplit(url)
    assert address.hostname is not None
    name, namespace, rest = address.hostname.split(".", 2)
    service = named(objects, "Service", name)
    assert (namespace, rest) == ("llm", "svc.cluster.local")
    assert address.port in [port["port"] for port in service["spec"]["ports"]]
    return service


def test_addresses_in_the_environment_and_in_the_test_are_those_of_services(objects: list[Object]) -> None:
    for name, container in all_containers(objects).items():
        for each in container.get("env", []):
            if each["name"] == "TERCET_REDIS_URL" and "value" in each:
                service = _service_of(objects, each["value"].replace("$(REDIS_PASSWORD)", "x"))
                assert len(selected(objects, service["spec"]["selector"])) == 1
        if name.endswith("/ask"):
            url = next(arg for arg in container["args"][1:] if arg.startswith("http"))
            (workload,) = selected(objects, _service_of(objects, url)["spec"]["selector"])
            assert workload.endswith("-frontend")


def test_variables_that_are_expanded_are_set_before(objects: list[Object]) -> None:
    groups = {each["metadata"]["name"] for each in of_kind(objects, "LeaderWorkerSet")}
    for name, container in all_containers(objects).items():
        known: set[str] = set()
        if name.partition("/")[0].removesuffix("-workers") in groups:
            known = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}  # put before all others
        for each in container.get("env", []):
            assert set(re.findall(r"\$\((\w+)\)", each.get("value", ""))) <= known, name
            known.add(each["name"])
        for arg in [*container["command"], *container["args"]]:
            assert set(re.findall(r"\$\((\w+)\)", arg)) <= known, name


# ------------------------------------------------------------------------------------------------ who may reach whom


def _policies(objects: list[Object], pod: Object) -> list[Object]:
    found = of_kind(objects, "NetworkPolicy")
    return [each for each in found if selects(each["spec"]["podSelector"]["matchLabels"], pod["metadata"]["labels"])]


def _opens(rule: Object, port: str | int, number: int) -> bool:
    return "ports" not in rule or any(each["port"] in (port, number) for each in rule["ports"])


def _meets(peers: list[Any], pod: Object) -> bool:
    """Whether peers include a pod of this namespace. Without any, everybody is meant."""

    def one(peer: Object) -> bool:
        if "podSelector" in peer:
            return selects(peer["podSelector"]["matchLabels"], pod["metadata"]["labels"])
        return peer.get("namespaceSelector") == {}

    return not peers or any(one(peer) for peer in peers)


def may_reach(objects: list[Object], source: Object, target: Object, port: str) -> bool:
    """Whether the policies let a pod connect to a port of another one."""
    number = ports_of(target)[port]
    outward = [each["spec"] for each in _policies(objects, source)]
    inward = [each["spec"] for each in _policies(objects, target)]
    leaves = not outward or any(
        _opens(rule, port, number) and _meets(rule.get("to", []), target) for spec in outward for rule in spec["egress"]
    )
    enters = not inward or any(
        _opens(rule, port, number) and _meets(rule.get("from", []), source)
        for spec in inward
        for rule in spec["ingress"]
    )
    return leaves and enters


@pytest.mark.parametrize("name", GUARDED)
def test_who_needs_to_may_and_others_may_not(name: str) -> None:
    objects = case(name)
    kinds: dict[str, list[Object]] = {}
    for _, pod in pods(objects):
        kinds.setdefault(pod["metadata"]["labels"]["app.kubernetes.io/component"], []).append(pod)
    stranger = {"metadata": {"labels": {"app": "stranger"}}, "spec": {"containers": []}}
    frontend, (test,) = kinds["frontend"][0], kinds["test"]
    for engine in kinds["engine"]:
        assert may_reach(objects, frontend, engine, "grpc")
        assert not may_reach(objects, stranger, engine, "grpc")
        label = engine["metadata"]["labels"]["tercet/model"]
        assert not any(
            may_reach(objects, engine, other, "grpc")
            for other in kinds["engine"] if other is not engine
        )  # fmt: skip
        group = [each for each in kinds.get("engine-worker", []) if each["metadata"]["labels"]["tercet/model"] == label]
        assert may_reach(objects, engine, engine, "grpc") == bool(group)  # the next group has the same labels
        assert not may_reach(objects, engine, frontend, "http")
        for worker in kinds.get("engine-worker", []):
            mine = worker in group
            assert may_reach(objects, worker, engine, "grpc") == mine
            assert may_reach(objects, engine, worker, "worker-metrics") or not mine
            if "rendezvous" in ports_of(engine):
                assert may_reach(objects, worker, engine, "rendezvous") == mine
                assert not may_reach(objects, frontend, engine, "rendezvous")
            assert not may_reach(objects, worker, frontend, "http")
            assert not any(may_reach(objects, worker, redis, "redis") for redis in kinds.get("redis", []))
    for redis in kinds.get("redis", []):
        assert all(may_reach(objects, pod, redis, "redis") for pod in [frontend, *kinds["engine"]])
        assert not may_reach(objects, stranger, redis, "redis")
        assert not may_reach(objects, redis, frontend, "http")
    assert may_reach(objects, test, frontend, "http")
    assert may_reach(objects, stranger, frontend, "http") == (name != "everything")
    assert may_reach(objects, stranger, frontend, "metrics") == (name != "everything")


@pytest.mark.parametrize("name", GUARDED)
def test_policies_name_pods_and_ports_that_exist(name: str) -> None:
    objects = case(name)
    for policy in of_kind(objects, "NetworkPolicy"):
        guarded = selected(objects, policy["spec"]["podSelector"]["matchLabels"])
        assert guarded
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", []):
                assert all(port["port"] in ports_of(pod) for pod in guarded.values())
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", [])]
        peers += [peer for rule in policy["spec"]["egress"] for peer in rule.get("to", [])]
        for peer in peers:
            if "podSelector" in peer:
                assert selected(objects, peer["podSelector"]["matchLabels"])


def _outside(name: str, component: str) -> set[int]:
    """Returns the ports to which pods may connect wherever these are."""
    objects = case(name)
    (policy,) = [
        each for each in of_kind(objects, "NetworkPolicy")
        if each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    ]  # fmt: skip
    return {port["port"] for rule in policy["spec"]["egress"] if "to" not in rule for port in rule["ports"]}


@pytest.mark.parametrize("component", ["frontend", "engine"])
def test_the_way_out_is_as_wide_as_it_must_be(component: str) -> None:
    assert _outside("defaults", component) == {53, 443}
    assert _outside("external redis", component) == {53, 443, 6380}
    assert _outside("everything", component) == {53, 443, 4317}
