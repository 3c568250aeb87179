"""The chart through Helm's own engine, as objects; and the values over which the checks go."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "tercet"
RELEASE, NAMESPACE = "prod", "llm"

Object = dict[str, Any]

HUB_MODEL = {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}
CLAIMED_MODEL = {"source": "llama", "volume": {"claimName": "models", "subPath": "released"}, "workload": "StatefulSet"}
MONITORING = {
    "prometheusUrl": "http://prometheus.monitoring:9090",
    "serviceMonitor": {"enabled": True, "labels": {"release": "kube-prometheus"}},
    "rules": {"enabled": True},
    "dashboards": {"enabled": True},
}
GPU_MODEL = {
    **HUB_MODEL,
    "strategy": {"maxSurge": 0, "maxUnavailable": 1},
    "worker": {
        "image": {"repository": "tercet-worker-cuda", "tag": "0.1.0"},
        "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "8", "memory": "64Gi"}},
    },
    "runtimeClassName": "nvidia",
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
    "priorityClassName": "serving",
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"models": {"smollm2": HUB_MODEL}},
    "two models": {
        "models": {
            "smollm2": {**HUB_MODEL, "servedNames": ["smollm2", "small"], "replicas": 3},
            "llama": {**CLAIMED_MODEL, "settings": {"maxNumSeqs": 64, "kvCacheMemory": "8GiB", "prefixCaching": False}},
        },
        "frontend": {"settings": {"modelAlias": ["chat=smollm2"], "modelSplit": ["new=smollm2:0.9,llama:0.1"]}},
    },
    "external redis": {
        "models": {"smollm2": HUB_MODEL},
        "redis": {"bundled": {"enabled": False}, "external": {"urlSecret": {"name": "redis-url"}, "port": 6380}},
    },
    "claims": {
        "models": {
            "llama": {**CLAIMED_MODEL, "source": "."},
            "hub": {**HUB_MODEL, "cache": {"kind": "claim", "claimName": "hub"}},
            "own": {**HUB_MODEL, "workload": "StatefulSet", "cache": {"kind": "perPod", "size": "20Gi"}},
        },
        "redis": {"bundled": {"persistence": {"enabled": True}, "passwordSecret": {"name": "redis"}}},
    },
    "mtls": {"models": {"smollm2": HUB_MODEL}, "mtls": {"secretName": "inside"}},
    "nothing watches": {
        "models": {"smollm2": HUB_MODEL},
        "settings": {"logFormat": "text"},
        "networkPolicy": {"enabled": False},
        "frontend": {"podDisruptionBudget": {"enabled": False}, "preStopSeconds": 0},
        "modelDefaults": {"podDisruptionBudget": {"enabled": False}},
        "serviceAccount": {"create": False},
    },
    "gpu": {
        "models": {"llama": {**GPU_MODEL, "autoscaling": {"kind": "keda", "maxReplicas": 8}}},
        "monitoring": MONITORING,
    },
    "groups": {
        "models": {
            "smollm2": HUB_MODEL,
            "large": {
                **GPU_MODEL,
                "parallel": {"tensor": 4, "pipeline": 2, "nodes": 2},
                "worker": {"resources": {"limits": {"nvidia.com/gpu": 4, "cpu": "8", "memory": "64Gi"}}},
                "autoscaling": {"kind": "keda"},
            },
            "huge": {
                **CLAIMED_MODEL, "workload": "Deployment", "replicas": 2, "settings": {"rendezvousTimeout": 60},
                "parallel": {"tensor": 2, "pipeline": 4, "nodes": 4},
            },
            "wide": {**HUB_MODEL, "parallel": {"tensor": 2}},
        },
        "mtls": {"secretName": "inside"},
        "monitoring": MONITORING,
    },
    "ipv6": {"models": {"smollm2": HUB_MODEL}, "ipv6": True},
    "everything": {
        "fullnameOverride": "tercet",
        "labels": {"team": "research"},
        "annotations": {"example.com/owner": "research"},
        "images": {
            "registry": "registry.example.com/llm", "pullSecrets": ["pull"], "core": {"digest": "sha256:" + "0" * 64},
        },
        "serviceAccount": {"annotations": {"example.com/role": "llm"}},
        "settings": {"otlpEndpoint": "http://collector.observability:4317", "traceRatio": 0.05, "logLevel": "warning"},
        "models": {
            "smollm2": {**HUB_MODEL, "revision": "main", "autoscaling": {"kind": "hpa"}, "settings": {"grace": 90.5}},
            "llama": {**CLAIMED_MODEL, "autoscaling": {"kind": "keda"}, "core": {"extraArgs": ["--policy=fair"]},
                      "extraVolumes": [{"name": "dumps", "emptyDir": {}}],
                      "extraVolumeMounts": [{"name": "dumps", "mountPath": "/dumps"}], "podAnnotations": {"a": "b"}},
        },
        "frontend": {
            "autoscaling": {"enabled": True},
            "apiKeys": {"secretName": "keys"},
            "tls": {"secretName": "public", "clientCaSecretName": "clients"},
            "settings": {"maxRequests": 1_000_000, "drainDelay": 4.2, "chatPage": False, "corsOrigin": ["https://a", "https://b"]},
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"example.com/internal": "true"}},
            "podLabels": {"tier": "edge"}, "podAnnotations": {"a": "b"}, "extraEnv": [{"name": "A", "value": "b"}],
            "nodeSelector": {"pool": "web"}, "extraArgs": ["--access-log=stderr"],
        },
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecretName": "public"},
        "httpRoute": {
            "enabled": True, "parentRefs": [{"name": "gateway", "namespace": "edge"}], "hostnames": ["llm.example.com"],
        },
        "redis": {"bundled": {"passwordSecret": {"name": "redis"}}},
        "hub": {"tokenSecret": {"name": "hub"}, "endpoint": "https://mirror.example.com"},
        "mtls": {"secretName": "inside"},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        },
        "monitoring": MONITORING,
        "test": {"apiKeySecret": {"name": "test-key"}},
    },
}  # fmt: skip


@functools.cache
def chart() -> Chart:
    """Returns the chart, loaded once."""
    return Chart.load(CHART)


def render_files(values: dict[str, Any], **options: Any) -> dict[str, str]:
    """Returns what each template makes, the notes too. Raises `HelmError` for values that the chart refuses."""
    return chart().render(values, **{"name": RELEASE, "namespace": NAMESPACE, **options})


def render(values: dict[str, Any], **options: Any) -> list[Object]:
    """Returns the objects that the chart makes of ``values``."""
    files = render_files(values, **options)
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


@functools.cache
def _case(name: str) -> str:
    return json.dumps(render(CASES[name]))


def case(name: str) -> list[Object]:
    """Returns the objects of one of `CASES`; rendered once."""
    objects: list[Object] = json.loads(_case(name))
    return objects


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Returns the objects of these kinds."""
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    """Returns the one object of this kind and name."""
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pods(objects: list[Object]) -> list[tuple[str, Object]]:
    """Returns name and pod (metadata and spec) of everything that runs; a group has two kinds of pods."""
    workloads = of_kind(objects, "Deployment", "StatefulSet")
    found = [(each["metadata"]["name"], each["spec"]["template"]) for each in workloads]
    for each in of_kind(objects, "LeaderWorkerSet"):
        name, templates = each["metadata"]["name"], each["spec"]["leaderWorkerTemplate"]
        found += [(name, templates["leaderTemplate"]), (f"{name}-workers", templates["workerTemplate"])]
    return found + [(each["metadata"]["name"], each) for each in of_kind(objects, "Pod")]


def containers(pod: Object) -> list[Object]:
    """Returns the containers of a pod, those that start first among them."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def all_containers(objects: list[Object]) -> dict[str, Object]:
    """Returns every container by ``pod/container``."""
    return {f"{name}/{each['name']}": each for name, pod in pods(objects) for each in containers(pod)}
