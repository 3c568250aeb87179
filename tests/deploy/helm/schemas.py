"""Whether Kubernetes would take an object: its published schemas, strictly, and those of the operators' own kinds."""

from __future__ import annotations

import functools
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import jsonschema_rs

from tests.deploy.helm.rendering import Object

OLDEST, NEWEST = "1.30", "1.37"
"""Versions of Kubernetes: the first that the chart supports, and the last of which the schemas are at hand."""

_OBJECT_META = {"type": "object", "required": ["name", "namespace", "labels"]}

HTTP_ROUTE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"const": "HTTPRoute"},
        "metadata": _OBJECT_META,
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "parentRefs": {"type": "array", "maxItems": 32, "items": {
                    "type": "object", "required": ["name"], "additionalProperties": False,
                    "properties": {
                        **{name: {"type": "string"} for name in ("group", "kind", "name", "namespace", "sectionName")},
                        "port": {"type": "integer"},
                    },
                }},
                "hostnames": {"type": "array", "maxItems": 16, "items": {"type": "string", "maxLength": 253}},
                "rules": {"type": "array", "maxItems": 16, "items": {
                    "type": "object", "additionalProperties": False,
                    "properties": {
                        "matches": {"type": "array", "items": {
                            "type": "object", "additionalProperties": False,
                            "properties": {"path": {
                                "type": "object", "additionalProperties": False,
                                "properties": {
                                    "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                    "value": {"type": "string", "pattern": "^/"},
                                },
                            }},
                        }},
                        "timeouts": {
                            "type": "object", "additionalProperties": False,
                            "properties": {
                                name: {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                                for name in ("request", "backendRequest")
                            },
                        },
                        "backendRefs": {"type": "array", "items": {
                            "type": "object", "required": ["name"], "additionalProperties": False,
                            "properties": {
                                "name": {"type": "string"},
                                "port": {"type": "integer", "minimum": 1, "maximum": 65_535},
                                "weight": {"type": "integer"}, "namespace": {"type": "string"},
                                "group": {"type": "string"}, "kind": {"type": "string"},
                            },
                        }},
                    },
                }},
            },
        },
    },
}  # fmt: skip
"""What the chart may use of https://gateway-api.sigs.k8s.io/reference/spec/#httproute; no wheel carries its schema."""


LEADER_WORKER_SET: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": _OBJECT_META,
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "type": "object", "required": ["subdomainPolicy"], "additionalProperties": False,
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "rolloutStrategy": {
                    "type": "object", "required": ["type"], "additionalProperties": False,
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": {
                            "type": "object", "additionalProperties": False,
                            "properties": {
                                "partition": {"type": "integer"},
                                "maxUnavailable": {"type": ["integer", "string"]},
                                "maxSurge": {"type": ["integer", "string"]},
                            },
                        },
                    },
                },
                "leaderWorkerTemplate": {
                    "type": "object", "required": ["workerTemplate"], "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}  # fmt: skip
"""What the chart may use of https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/, written from that
description, since no wheel carries its schema. Its pods are Kubernetes' own, and are held to the schema of those."""


def complaints(document: Object, version: str) -> list[str]:
    """Returns what Kubernetes of this version would refuse about the object; nothing, if it takes it."""
    group = document["apiVersion"].partition("/")[0]
    if group in ("monitoring.coreos.com", "keda.sh"):
        return _unlike_model(document)
    if group == "gateway.networking.k8s.io":
        return _errors(jsonschema_rs.validator_for(HTTP_ROUTE), document)
    if group == "leaderworkerset.x-k8s.io":
        return _errors(jsonschema_rs.validator_for(LEADER_WORKER_SET), document) + [
            f"{name}: {text}"
            for name, template in document["spec"]["leaderWorkerTemplate"].items() if name.endswith("Template")
            for text in _errors(_kubernetes("PodTemplate", "v1", version), _pod_template(template))
        ]  # fmt: skip
    return _errors(_kubernetes(document["kind"], document["apiVersion"], version), document)


def _pod_template(template: Object) -> Object:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}


def _errors(validator: Any, document: Object) -> list[str]:
    return [f"{'.'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(document)]


def _directory(version: str) -> Path:
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@functools.cache
def _definitions(version: str) -> Any:
    definitions = json.loads((_directory(version) / "_definitions.json").read_text())
    return jsonschema_rs.Registry([("https://kubernetes.io/api/_definitions.json", definitions)])


@functools.cache
def _kubernetes(kind: str, api_version: str, version: str) -> Any:
    group, _, number = api_version.rpartition("/")
    api = f"{group.partition('.')[0]}-{number}" if group else number
    schema = json.loads((_directory(version) / f"{kind.lower()}-{api}.json").read_text())
    return jsonschema_rs.validator_for(schema, registry=_definitions(version))


@functools.cache
def _models() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generated code that is not ours
        from cloudcoil.models.keda import v1alpha1 as keda  # noqa: PLC0415  # these take seconds to import
        from cloudcoil.models.prometheus_operator import v1 as prometheus  # noqa: PLC0415
    return {
        "ServiceMonitor": prometheus.ServiceMonitor,
        "PrometheusRule": prometheus.PrometheusRule,
        "ScaledObject": keda.ScaledObject,
    }


def _unlike_model(document: Object) -> list[str]:
    """Operators' kinds exist as models made from their definitions, which drop what they do not know."""
    understood = _models()[document["kind"]].model_validate(document).model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )  # fmt: skip
    return list(_missing(document, understood, document["kind"]))


def _missing(given: Any, understood: Any, path: str) -> list[str]:
    if isinstance(given, dict) and isinstance(understood, dict):
        lost = [f"{path}.{name}: unknown" for name in given.keys() - understood.keys()]
        return lost + [
            text
            for name in given.keys() & understood.keys()
            for text in _missing(given[name], understood[name], f"{path}.{name}")
        ]
    if isinstance(given, list) and isinstance(understood, list):
        return [
            text
            for index, pair in enumerate(zip(given, understood, strict=True))
            for text in _missing(*pair, f"{path}.{index}")
        ]
    return []
