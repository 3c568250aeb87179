"""Wrong values are refused before anything is installed, by their name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helm_python import HelmError

from tercet_shared.config import Common, CoreSettings, FrontendSettings, WorkerSettings, parse
from tests.deploy.helm.rendering import CASES, CHART, HUB_MODEL, all_containers, case, chart, render
from tools.generate_settings import CHART_SETS, NOT_FOR_USERS, camel, for_chart, settings_schema

MODEL = {"models": {"m": HUB_MODEL}}
SERVICES: dict[str, Any] = {"frontend": FrontendSettings, "core": CoreSettings, "worker": WorkerSettings}


def with_model(**values: Any) -> dict[str, Any]:
    return {"models": {"m": {**HUB_MODEL, **values}}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "/models"),
        ({"models": {}}, "/models"),
        ({"models": {"m": {}}}, "source"),
        ({"models": {"Big_Model": HUB_MODEL}}, "Big_Model"),
        ({"models": {"frontend": HUB_MODEL}}, "frontend"),
        ({"models": {"m" * 21: HUB_MODEL}}, "m" * 21),
        ({**MODEL, "modles": {}}, "modles"),
        ({**MODEL, "frontend": {"replica": 3}}, "replica"),
        ({**MODEL, "frontend": {"replicas": "three"}}, "/frontend/replicas"),
        ({**MODEL, "frontend": {"ports": {"http": 70_000}}}, "/frontend/ports/http"),
        ({**MODEL, "frontend": {"settings": {"maxRequest": 1}}}, "maxRequest"),
        ({**MODEL, "frontend": {"settings": {"maxRequests": -1}}}, "/frontend/settings/maxRequests"),
        ({**MODEL, "frontend": {"settings": {"grace": 0}}}, "/frontend/settings/grace"),
        ({**MODEL, "frontend": {"settings": {"apiKey": ["secret"]}}}, "apiKey"),
        ({**MODEL, "frontend": {"settings": {"redisUrl": "redis://:secret@host"}}}, "redisUrl"),
        ({**MODEL, "frontend": {"settings": {"routingPolicy": "luck"}}}, "routingPolicy"),
        ({**MODEL, "frontend": {"settings": {"corsOrigin": "https://a"}}}, "corsOrigin"),
        ({**MODEL, "settings": {"maxNumSeqs": 4}}, "maxNumSeqs"),
        ({**MODEL, "settings": {"logFormat": "xml"}}, "logFormat"),
        (with_model(settings={"dtype": "int3"}), "/models/m/settings/dtype"),
        (with_model(settings={"blockSize": 0}), "/models/m/settings/blockSize"),
        (with_model(settings={"kvCacheMemory": "lots"}), "kvCacheMemory"),
        (with_model(workload="DaemonSet"), "workload"),
        (with_model(cache={"kind": "disk"}), "/models/m/cache/kind"),
        (with_model(cache={"kind": "perPod", "size": "1Gi"}), "models.m.cache.kind: perPod needs workload StatefulSet"),
        (with_model(cache={"kind": "perPod"}, workload="StatefulSet"), "models.m.cache.size"),
        (with_model(cache={"kind": "claim"}), "models.m.cache.claimName"),
        ({"models": {"m": {"source": "/abs", "volume": {"claimName": "c"}}}}, "models.m.source"),
        (with_model(parallel={"nodes": 0}), "/models/m/parallel/nodes"),
        (with_model(parallel={"gpus": 2}), "gpus"),
        (with_model(parallel={"tensor": 4, "nodes": 3}), "models.m.parallel: 4 x 1 ranks"),
        (with_model(parallel={"tensor": 2}, worker={"resources": {"limits": {"nvidia.com/gpu": 1}}}),
         "models.m.worker.resources.limits"),
        (with_model(parallel={"tensor": 2, "nodes": 2}, workload="StatefulSet",
                    cache={"kind": "perPod", "size": "1Gi"}), "models.m.cache.kind"),
        (with_model(settings={"tensorParallelSize": 2}), "tensorParallelSize"),
        ({"models": {"m" * 20: {**HUB_MODEL, "parallel": {"tensor": 2, "nodes": 2}}}, "fullnameOverride": "f" * 30},
         "fullnameOverride"),
        (with_model(autoscaling={"kind": "keda"}), "monitoring.prometheusUrl"),
        (with_model(autoscaling={"kind": "hpa", "minReplicas": 9}), "models.m.autoscaling"),
        (with_model(autoscaling={"kind": "hpa", "minReplicas": 0}), "minReplicas"),
        ({**MODEL, "frontend": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "frontend.autoscaling"),
        ({**MODEL, "frontend": {"apiKeys": {"secretName": "k", "key": "keys.yaml"}}}, "/frontend/apiKeys/key"),
        ({**MODEL, "frontend": {"tls": {"clientCaSecretName": "clients"}}}, "frontend.tls.clientCaSecretName"),
        ({**MODEL, "redis": {"bundled": {"enabled": False}}}, "redis"),
        ({**MODEL, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({**MODEL, "podSecurity": {"runAsUser": 0}}, "/podSecurity/runAsUser"),
        ({**MODEL, "images": {"core": {"digest": "latest"}}}, "/images/core/digest"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError) as caught:
        render(values)
    assert said in str(caught.value)


def test_a_name_that_would_be_too_long_is_refused_and_not_cut() -> None:
    with pytest.raises(HelmError, match="fullnameOverride"):
        render(MODEL, name="a-release-with-quite-a-long-name")
    assert render({**MODEL, "fullnameOverride": "short"}, name="a-release-with-quite-a-long-name")


def test_a_default_can_be_taken_away() -> None:
    args = all_containers(render({**MODEL, "settings": {"logFormat": None}}))["prod-tercet-m/core"]["args"]
    assert not any(arg.startswith("--log-format") for arg in args)


def test_what_a_model_says_wins_over_what_all_models_have() -> None:
    objects = render({
        "modelDefaults": {"replicas": 5, "settings": {"grace": 7, "policy": "fair"}},
        "models": {"a": HUB_MODEL, "b": {**HUB_MODEL, "replicas": 2, "settings": {"grace": 9}}},
    })  # fmt: skip
    a, b = (all_containers(objects)[f"prod-tercet-{name}/core"]["args"] for name in "ab")
    assert {"--grace=7", "--policy=fair"} <= set(a)
    assert {"--grace=9", "--policy=fair"} <= set(b)


def test_every_value_is_described_once() -> None:
    """Names that the schema knows and those of values.yaml are the same; so the README's table is complete."""
    schema = chart().schema
    assert schema is not None

    def compare(values: Any, node: dict[str, Any], path: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if not isinstance(values, dict) or "properties" not in node or path.endswith("settings"):
            return
        known = node["properties"].keys() - {"global"}
        assert values.keys() == known, path
        for name in known:
            compare(values[name], node["properties"][name], f"{path}/{name}")

    compare(chart().values, schema, "")


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_can_be_given_and_arrives(service: str) -> None:
    """Camel case there, and back: what the chart makes of a setting's name is the flag."""
    kind = SERVICES[service]
    names = for_chart(kind)
    samples = {camel(name): _sample(settings_schema(kind)["properties"][camel(name)]) for name in names}
    values: dict[str, Any] = with_model()
    place = values.setdefault("frontend", {}) if service == "frontend" else values["models"]["m"]
    place["settings"] = samples
    (args,) = (each["args"] for name, each in all_containers(render(values)).items() if name.endswith(f"/{service}"))
    settings = parse(kind, [arg for arg in args if not arg.startswith(("--mtls", "--advertise"))])
    for name in names:
        given, arrived = samples[camel(name)], getattr(settings, name)
        assert arrived == given or str(arrived) == str(given), name


def _sample(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][-1]
    kinds = schema["type"]
    if "boolean" in kinds:
        return True
    if "array" in kinds:
        return ["a=b:1,c:2", "d=e:1"] if "divided" in schema["description"] else ["a=b", "c=d"]
    if "integer" in kinds:
        return min(schema.get("maximum", 5_000_000), 2_000_000)
    if "number" in kinds:
        return min(schema.get("maximum", 1.5), 0.5)
    return "http://host:1" if "OTLP" in schema["description"] else "off"


def test_what_the_chart_sets_itself_exists() -> None:
    exist = {name for kind in SERVICES.values() for name in kind.model_fields}
    assert exist >= CHART_SETS
    assert exist >= NOT_FOR_USERS


def test_settings_of_all_are_understood_by_all() -> None:
    args = {
        name: each["args"]
        for name, each in all_containers(case("everything")).items()
        if each["command"][0] == "tercet"
    }
    for name, given in args.items():
        assert "--otlp-endpoint=http://collector.observability:4317" in given, name
        assert "--log-level=warning" in given, name
    assert {camel(name) for name in for_chart(Common)} >= {"otlpEndpoint", "logLevel", "logFormat", "traceRatio"}


def test_the_schema_is_one_that_helm_reads() -> None:
    document = json.loads((CHART / "values.schema.json").read_text())
    assert document["additionalProperties"] is False
    for name, values in CASES.items():
        chart().validate_schema(values), name
