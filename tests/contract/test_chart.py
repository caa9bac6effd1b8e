# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm's own engine.

An API server accepts every object of every profile, the objects fit each other, and the router accepts its settings.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from kvrouter.router.app.server.supervisor import CLOSE_TIMEOUT_S
from kvrouter.router.follow.discovery.kubernetes.pods import Pod, candidates_of
from kvrouter.router.model.config.loading import load_config
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.browser_policy import BrowserPolicy
from tests.support.chart import CHART, PROFILES, ROOT, check_object, container, one, rendered
from tests.support.helm_template import HelmError, helm_template

Objects = list[dict[str, Any]]
WORKLOADS = ("Deployment", "StatefulSet")


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def flags(arguments: list[str]) -> dict[str, Any]:
    pairs = [word.removeprefix("--").split("=", 1) for word in arguments[1:]]
    return {name.replace("-", "_"): value for name, value in pairs}


def settings(objects: Objects) -> Config:
    """Return the settings of the router that these objects start."""
    router = container(one(objects, "Deployment"))
    environ = {variable["name"]: variable.get("value", "redis://secret:6379") for variable in router["env"]}
    return load_config(None, environ, flags(router["args"]))


@pytest.mark.parametrize("name", PROFILES)
def test_an_api_server_takes_every_object(name: str) -> None:
    objects = rendered(name)
    for each in objects:
        check_object(each)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    everything_namespaced = {each["metadata"].get("namespace") for each in objects if each["kind"] != "PriorityClass"}
    assert everything_namespaced == {"serving"}


BREAKS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a number as text": ("Deployment", lambda spec: spec.update(replicas="two")),
    "an unknown field": ("Deployment", lambda spec: spec["template"]["spec"]["containers"][0].update(commands=["a"])),
    "a missing field": ("StatefulSet", lambda spec: spec.pop("selector")),
    "a port beyond all": ("InferencePool", lambda spec: spec["targetPorts"][0].update(number=70_000)),
    "a picker without a port": ("InferencePool", lambda spec: spec["endpointPickerRef"].pop("port")),
    "an unknown mode": ("InferencePool", lambda spec: spec["endpointPickerRef"].update(failureMode="Open")),
    "a route to nowhere": ("HTTPRoute", lambda spec: spec["rules"][0]["backendRefs"][0].pop("name")),
    "a misspelt endpoint": ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(intervals="1s")),
    "an alert without a query": ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
    "a policy of no type": ("NetworkPolicy", lambda spec: spec.update(policyTypes="Ingress")),
}


@pytest.mark.parametrize("name", BREAKS)
def test_objects_that_an_api_server_refuses_are_refused_here(name: str) -> None:
    kind, breaks = BREAKS[name]
    value = copy.deepcopy(next(each for each in rendered("everything") if each["kind"] == kind))
    check_object(value)
    breaks(value["spec"])
    with pytest.raises(jsonschema.ValidationError):
        check_object(value)


@pytest.mark.parametrize("name", PROFILES)
def test_every_object_that_is_named_exists(name: str) -> None:
    objects = rendered(name)
    named = {(each["kind"], each["metadata"]["name"]) for each in objects}
    workloads = [each for each in objects if each["kind"] in WORKLOADS]
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels_of(workload).items()
        if account := pod.get("serviceAccountName"):
            assert ("ServiceAccount", account) in named
        if priority := pod.get("priorityClassName"):
            assert ("PriorityClass", priority) in named
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | claims
        for each in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in each.get("volumeMounts", [])} <= volumes
            ports = {port["name"] for port in each.get("ports", [])}
            probes = [each[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe") if probe in each]
            places = [*(probe.get("httpGet") or probe.get("tcpSocket") for probe in probes)]
            assert {place["port"] for place in places if place} <= ports
    selectors = [each["spec"]["selector"] for each in objects if each["kind"] == "Service"]
    selectors += [
        each["spec"]["selector"]["matchLabels"]
        for each in objects
        if each["kind"] in ("PodDisruptionBudget", "ServiceMonitor", "InferencePool")
    ]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in objects if each["kind"] == "NetworkPolicy"]
    engines = {"app.kubernetes.io/component": "engine"}
    for selector in selectors:
        chosen = [workload for workload in workloads if selector.items() <= labels_of(workload).items()]
        # Engines may be deployed elsewhere; then a selector of engines matches no workload of the chart.
        assert len(chosen) == 1 or (not chosen and engines.items() <= selector.items())


@pytest.mark.parametrize("name", PROFILES)
def test_the_routers_settings_are_its_own_and_find_the_engines(name: str) -> None:
    objects = rendered(name)
    deployment = one(objects, "Deployment")
    config = settings(objects)
    assert config.host == "0.0.0.0" and config.redis and config.kubernetes_selector and config.log_format == "json"
    ports = {"http": config.port} | ({} if config.gateway_port is None else {"grpc": config.gateway_port})
    assert container(deployment)["ports"] == [{"name": name, "containerPort": port} for name, port in ports.items()]
    wanted = dict(part.split("=") for part in config.kubernetes_selector.split(","))
    engines = [each for each in objects if each["kind"] in WORKLOADS and wanted.items() <= labels_of(each).items()]
    assert [each["metadata"]["name"] for each in engines] == ["kvrouter-engine"] * PROFILES[name].get("engine", {}).get(
        "enabled", False
    ), "neither itself nor the store"


@pytest.mark.parametrize("name", PROFILES)
def test_a_rollout_has_time_for_all_of_a_routers_end(name: str) -> None:
    objects = rendered(name)
    deployment = one(objects, "Deployment")
    router = container(deployment)
    arguments = flags(router["args"])
    ends = float(arguments["shutdown_delay_s"]) + float(arguments["drain_s"]) + CLOSE_TIMEOUT_S
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > ends
    # The delay is long enough for the failing readiness to be noticed.
    assert float(arguments["shutdown_delay_s"]) >= 5 and "lifecycle" not in router
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert router["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {router[probe]["httpGet"]["path"] for probe in ("livenessProbe", "startupProbe")} == {"/health"}
    # A Service named kvrouter would put KVROUTER_PORT=tcp://... into every pod.
    assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_settings_reach_the_router_as_they_are_meant() -> None:
    config = settings(
        helm_template(
            CHART,
            {
                "router": {
                    "settings": {"mirror_budget_bytes": 2**31, "temperature": 0.5, "allow_hosts": ["10.0.0.0/8", "a"]}
                }
            },
        )
    )
    assert (config.mirror_budget_bytes, config.temperature, config.allow_hosts) == (2**31, 0.5, ("10.0.0.0/8", "a"))
    assert settings(rendered("simulator")).mirror_budget_bytes == 2**28


def test_a_router_of_the_chart_answers_to_all_that_its_objects_call_it() -> None:
    for values, names in (
        ({}, ()),
        ({"service": {"hosts": ["llm.example"], "clusterDomain": "other.local"}}, ("llm.example",)),
    ):
        objects = helm_template(CHART, values)
        policy = BrowserPolicy(settings(objects))
        service = one(objects, "Service")["metadata"]
        domain = values.get("service", {}).get("clusterDomain", "cluster.local")
        above = f"{service['name']}.{service['namespace']}"
        # The hosts of clients in the cluster, of probes and Prometheus (a pod's address), and of a user who forwards a
        # port.
        for host in (service["name"], above, f"{above}.svc", f"{above}.svc.{domain}", "10.0.0.5", "localhost", *names):
            assert policy.host_problem(f"{host}:80".encode()) is None, host
        for host in ("evil.example", f"evil.example.{domain}", f"{above}.evil.example"):
            assert policy.host_problem(host.encode()) is not None, host


def test_the_role_allows_what_is_used_and_no_more() -> None:
    objects = rendered("everything")
    role, binding, account = (one(objects, kind) for kind in ("Role", "RoleBinding", "ServiceAccount"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "serving"}
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == subject["name"]
    elsewhere = helm_template(CHART, {"discovery": {"namespace": "models", "selector": "app=vllm"}})
    assert {one(elsewhere, kind)["metadata"]["namespace"] for kind in ("Role", "RoleBinding")} == {"models"}
    assert settings(elsewhere).kubernetes_namespace == "models"


@pytest.mark.parametrize("name", ["simulator", "vllm"])
def test_an_engines_pod_is_a_worker_with_its_event_ports(name: str) -> None:
    engine = one(rendered(name), "Deployment", "engine")
    template = engine["spec"]["template"]
    status = {"podIP": "10.0.0.5", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    raw = json.dumps({"metadata": {"name": "e-0", **template["metadata"]}, "spec": template["spec"], "status": status})
    (candidate,) = candidates_of(msgspec.json.decode(raw.encode(), type=Pod))
    found_registration = candidate.registration
    assert (found_registration.url, found_registration.events, found_registration.replay) == (
        "http://10.0.0.5:8000",
        "tcp://10.0.0.5:5557",
        "tcp://10.0.0.5:5558",
    )
    words = container(engine)["args"]
    if name == "vllm":
        events = json.loads(words[words.index("--kv-events-config") + 1])
        assert events == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5558",
        }
        # Without these details, the reused tokens are not reported.
        assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(words)
        assert container(engine)["env"][0] == {"name": "PYTHONPATH", "value": "/patch"}
    else:
        assert "nvidia.com/gpu" not in json.dumps(engine)
    hook = container(engine)["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[2].strip() == (CHART / "files" / "wait-until-idle.py").read_text().strip()


@pytest.mark.parametrize("name", ["simulator and gateway", "everything"])
def test_the_pool_asks_the_routers_for_endpoints(name: str) -> None:
    objects = rendered(name)
    pool, route, service = (one(objects, kind) for kind in ("InferencePool", "HTTPRoute", "Service"))
    router = container(one(objects, "Deployment"))
    picker = pool["spec"]["endpointPickerRef"]
    (port,) = (each for each in service["spec"]["ports"] if each["name"] == "grpc")
    assert (picker["name"], picker["port"]["number"]) == (service["metadata"]["name"], port["port"])
    assert {"name": "grpc", "containerPort": port["port"]} in router["ports"]
    assert router["args"][0] == "epp" and f"--gateway-port={port['port']}" in router["args"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": pool["metadata"]["name"],
    }
    engine = one(objects, "Deployment", "engine")
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels_of(engine).items()
    assert {"name": "http", "containerPort": pool["spec"]["targetPorts"][0]["number"]} in container(engine)["ports"]
    if name == "everything":
        (mounted,) = (each["mountPath"] for each in router["volumeMounts"] if each["name"] == "gateway-tls")
        arguments = flags(router["args"])
        assert (
            arguments["gateway_certificate"] == f"{mounted}/tls.crt"
            and arguments["gateway_key"] == f"{mounted}/tls.key"
        )


def test_only_routers_reach_the_event_ports_and_the_store() -> None:
    objects = rendered("everything")
    router = labels_of(one(objects, "Deployment"))
    engines = one([each for each in objects if each["metadata"]["name"].endswith("-engines")], "NetworkPolicy")
    everybody, routers = engines["spec"]["ingress"]
    assert "from" not in everybody and [each["port"] for each in everybody["ports"]] == [8000]
    (peer,) = routers["from"]
    assert peer["podSelector"]["matchLabels"].items() <= router.items()
    ports = {each["containerPort"] for each in container(one(objects, "Deployment", "engine"))["ports"]}
    assert ports - {8000} <= {each["port"] for each in routers["ports"]}
    store = one(objects, "NetworkPolicy", "store")
    (rule,) = store["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= router.items()


def test_alerts_and_dashboard_are_the_files_themselves() -> None:
    objects = rendered("everything")
    data = {name: text for each in objects if each["kind"] == "ConfigMap" for name, text in each["data"].items()}
    alerts = (ROOT / "deploy/prometheus/alerts.yaml").read_text()
    assert data == {"kvrouter.yaml": alerts, "kvrouter.json": (ROOT / "deploy/grafana/kvrouter.json").read_text()}
    assert one(objects, "PrometheusRule")["spec"] == yaml.safe_load(alerts)


def test_a_key_is_required_where_it_is_set() -> None:
    (endpoint,) = one(rendered("everything"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "keys", "key": "api-key"}
    (open_endpoint,) = one(rendered("vllm"), "ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in open_endpoint
    own = {"metrics": {"serviceMonitor": {"enabled": True, "apiKey": {"secret": "watchers", "key": "prometheus"}}}}
    for values in (own, {"apiKey": {"secret": "keys"}, **own}):
        (endpoint,) = one(helm_template(CHART, values), "ServiceMonitor")["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "watchers", "key": "prometheus"}


def test_a_certificate_and_keys_reach_the_router_and_who_asks_it() -> None:
    objects = rendered("everything")
    router = container(one(objects, "Deployment"))
    config = settings(objects)
    mounts = {mount["name"]: mount["mountPath"] for mount in router["volumeMounts"]}
    assert config.tls_certificate == f"{mounts['tls']}/tls.crt" and config.tls_key == f"{mounts['tls']}/tls.key"
    assert config.api_keys_file == f"{mounts['keys']}/keys.yaml"
    volumes = {volume["name"]: volume for volume in one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]}
    assert (volumes["tls"]["secret"], volumes["keys"]["secret"]) == (
        {"secretName": "port-tls"},
        {"secretName": "scopes"},
    )
    for variant, scheme in ((objects, "HTTPS"), (rendered("defaults"), "HTTP")):
        probed = container(one(variant, "Deployment"))
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert probed[probe]["httpGet"]["scheme"] == scheme
    (endpoint,) = one(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"]["ca"]["secret"] == {
        "name": "port-tls",
        "key": "ca.crt",
    }
    assert settings(rendered("defaults")).tls_certificate is None


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replicas": 3}, "replicas"),
        ({"replicaCount": 0}, "replicaCount"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"router": {"settings": {"port": 8080}}}, "router.settings.port: other values of the chart give it"),
        ({"store": {"url": "redis://user:password@cache:6379"}}, "url"),
        ({"store": {"valkey": {"enabled": False}}}, "no store: several routers need one Redis or Valkey"),
        ({"gateway": {"enabled": True}}, "gateway.httpRoute.parentRefs is empty: name the Gateways"),
        (
            {"gateway": {"enabled": True, "httpRoute": {"enabled": False}}, "discovery": {"namespace": "x"}},
            "own namespace only",
        ),
        (
            {"networkPolicy": {"enabled": True}, "discovery": {"selector": "app in (a, b)"}},
            "networkPolicy.engineMatchLabels",
        ),
        ({"engine": {"kind": "sglang"}}, "kind"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], why: str) -> None:
    with pytest.raises(HelmError, match=why):
        helm_template(CHART, values)


def keys(value: Any, above: str = "") -> set[str]:
    return {f"{above}{name}" for name in value} | {
        path for name, under in value.items() if isinstance(under, dict) for path in keys(under, f"{above}{name}.")
    }


def test_the_schema_has_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def allowed(under: dict[str, Any], above: str = "") -> set[str]:
        paths = set()
        for name, subschema in under.get("properties", {}).items():
            paths |= {f"{above}{name}"} | allowed(subschema, f"{above}{name}.")
        return paths

    # `global` is a value of Helm itself.
    wanted = allowed(schema) - {"global"}
    assert wanted <= keys(values)
    assert {path for path in keys(values) - wanted if path.rpartition(".")[0] in wanted} <= {
        # Names below these values are the user's, or come from a definition.
        *(
            path
            for path in keys(values)
            if any(part in path for part in ("resources.", "labels.", "apiKey.", "workerApiKey."))
        ),
    }


def test_the_readme_is_made_of_the_values() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/chart_readme.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    image = next(service["image"] for service in compose.values() if service["image"].startswith("hybrid-kv-router:"))
    assert container(one(rendered("defaults"), "Deployment"))["image"] == image
