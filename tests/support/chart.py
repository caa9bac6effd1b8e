# SPDX-License-Identifier: Apache-2.0
"""The Helm chart as Helm renders it for each profile, and a check whether an API server would accept the objects."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.support.helm_template import helm_template, merged

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "kvrouter"
CUSTOM_RESOURCES: dict[str, Any] = json.loads((ROOT / "tests/golden/custom_resources.json").read_text())
# The oldest version that Chart.yaml allows, and the newest whose schemas `kubernetes_validate` has.
KUBERNETES_VERSIONS = ("1.27", "1.37")

# Values that turn on every option of the chart.
EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": ["pull"],
    "apiKey": {"secret": "keys"},
    "workerApiKey": {"secret": "keys"},
    "router": {
        "settings": {"allow_hosts": ["10.0.0.0/8", "*.local"], "access_log": True},
        "env": [{"name": "A", "value": "b"}],
    },
    "service": {"type": "LoadBalancer", "tlsSecret": "port-tls"},
    "apiKeysSecret": "scopes",
    "gateway": {
        "enabled": True,
        "tlsSecret": "tls",
        "httpRoute": {"parentRefs": [{"name": "g"}], "hostnames": ["a.example"]},
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "alerts": {"configMap": True, "prometheusRule": True},
        "dashboard": {"configMap": True},
    },
    "networkPolicy": {"enabled": True},
    "autoscaling": {"enabled": True},
    "priorityClass": {"create": True},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "store": {"valkey": {"storageClass": "fast"}},
    "engine": {
        "enabled": True,
        "args": ["--max-model-len", "8192"],
        "env": [{"name": "A", "value": "b"}],
        "hubSecret": "hub",
        "modelCacheClaim": "models",
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
}


def profile(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "profiles" / f"{name}.yaml").read_text())
    return values


PROFILES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "simulator": profile("simulator"),
    "vllm": profile("vllm"),
    "simulator and gateway": merged(profile("simulator"), profile("gateway")),
    "own store": {"store": {"url": "rediss+cluster://cache:6379"}, "engine": {"enabled": True, "patch": "image"}},
    "store in a secret": {
        "store": {"secret": "redis"},
        "engine": {"enabled": True, "patch": "none"},
        "replicaCount": 1,
    },
    "everything": EVERYTHING,
}


@functools.cache
def rendered(name: str) -> list[dict[str, Any]]:
    return helm_template(CHART, PROFILES[name])


def one(objects: list[dict[str, Any]], kind: str, component: str = "router") -> dict[str, Any]:
    (match,) = (
        candidate
        for candidate in objects
        if candidate["kind"] == kind and candidate["metadata"]["labels"]["app.kubernetes.io/component"] == component
    )
    return match


def container(workload: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


def check_object(value: dict[str, Any]) -> None:
    """Validate an object as an API server would.

    Raises:
        jsonschema.ValidationError: If an API server would refuse the object, or drop one of its fields as unknown.
    """
    custom = CUSTOM_RESOURCES.get(value["kind"])
    if custom is None:
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(value, version, strict=True)
        return
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": custom["apiVersion"]},
            "kind": True,
            "metadata": {"type": "object", "required": ["name"]},
            "spec": custom["spec"],
        },
    }
    jsonschema.validate(value, schema)
