# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/kubernetes say what the router takes, and what docs and error texts promise of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvrouter.router.config.loading import load_config
from kvrouter.router.config.settings import EPP_PORT, Config
from kvrouter.router.discovery.files.workers_file import parse_workers
from kvrouter.router.discovery.kubernetes.access import access_from
from kvrouter.router.discovery.kubernetes.pods import Pod, candidates_of
from kvrouter.router.server.supervisor import CLOSE_TIMEOUT_S
from kvrouter.router.workers.source_precedence import FILE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"


def documents(name: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    found = [one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one]
    assert all(one.get("apiVersion") and one["metadata"]["name"] for one in found)
    return {one["kind"]: one for one in found}


def flags(arguments: list[str]) -> dict[str, Any]:
    """What `kvrouter serve` is given, as it reads it."""
    assert arguments[0] == "serve"
    pairs = list(zip(arguments[1::2], arguments[2::2], strict=True))
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}


def matches(selector: str, labels: dict[str, str]) -> bool:
    return dict(part.split("=") for part in selector.split(",")).items() <= labels.items()


def test_the_routers_settings_are_its_own_and_find_the_engines() -> None:
    router = documents("router.yaml")["Deployment"]["spec"]["template"]
    (container,) = router["spec"]["containers"]
    environ = {one["name"]: one.get("value", "secret") for one in container["env"]}
    config = load_config(None, environ, flags(container["args"]))
    assert config.kubernetes_selector is not None and config.host == "0.0.0.0" and config.api_key
    engines = documents("engines.yaml")["Deployment"]["spec"]["template"]
    assert matches(config.kubernetes_selector, engines["metadata"]["labels"])
    assert not matches(config.kubernetes_selector, router["metadata"]["labels"]), "it must not find itself"
    assert container["ports"] == [{"name": "http", "containerPort": Config().port}]
    # A rollout loses nothing: connections are taken until no more are sent there, and there is time for all of
    # the end.
    assert config.shutdown_delay_s >= 5 and "preStop" not in json.dumps(container)
    assert router["spec"]["terminationGracePeriodSeconds"] >= config.shutdown_delay_s + config.drain_s + CLOSE_TIMEOUT_S
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "startupProbe")} == {"/health"}
    service = documents("router.yaml")["Service"]["spec"]
    assert service["selector"].items() <= router["metadata"]["labels"].items()
    # What a Service of this name puts into every pod's environment is not taken for settings.
    load_config(None, {"KVROUTER_PORT": "tcp://10.0.0.7:80", "KVROUTER_SERVICE_HOST": "10.0.0.7"}, {})


def test_the_pool_is_the_engines_and_its_picker_the_router() -> None:
    found = documents("gateway.yaml")
    pool, service = found["InferencePool"]["spec"], found["Service"]
    engines = documents("engines.yaml")["Deployment"]["spec"]["template"]
    router = documents("router.yaml")["Deployment"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= engines["metadata"]["labels"].items()
    ports = [one["containerPort"] for one in engines["spec"]["containers"][0]["ports"] if one["name"] == "http"]
    assert [one["number"] for one in pool["targetPorts"]] == ports
    picker = pool["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == (service["metadata"]["name"], EPP_PORT)
    assert service["spec"]["selector"].items() <= router["metadata"]["labels"].items()
    assert [one["port"] for one in service["spec"]["ports"]] == [EPP_PORT]
    (backend,) = found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", found["InferencePool"]["metadata"]["name"])


def test_the_image_is_the_one_that_is_built_here() -> None:
    (container,) = documents("router.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["router"]
    assert container["image"] == compose["image"]
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    image = re.findall(r"KVROUTER_DATA_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    assert len(image) == 1 and {*image, "/tmp"} == written


def test_an_engines_pod_is_a_worker_with_its_event_ports() -> None:
    template = documents("engines.yaml")["Deployment"]["spec"]["template"]
    status = {"podIP": "10.0.0.5", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    raw = json.dumps(
        {"metadata": {"name": "engine-0", **template["metadata"]}, "spec": template["spec"], "status": status}
    )
    (candidate,) = candidates_of(msgspec.json.decode(raw.encode(), type=Pod))
    (container,) = template["spec"]["containers"]
    events = json.loads(container["args"][container["args"].index("--kv-events-config") + 1])
    # docs/how-to/monitoring.md: without it nobody knows what was reused.
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(container["args"])
    known = candidate.registration
    assert (known.url, known.events) == ("http://10.0.0.5:8000", events["endpoint"].replace("*", "10.0.0.5"))
    assert known.replay == events["replay_endpoint"].replace("*", "10.0.0.5") and events["enable_kv_cache_events"]


def test_the_role_allows_what_is_asked_and_no_more() -> None:
    rbac = documents("rbac.yaml")
    assert rbac["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    account = rbac["ServiceAccount"]["metadata"]["name"]
    (subject,) = rbac["RoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account}
    assert rbac["RoleBinding"]["roleRef"]["name"] == rbac["Role"]["metadata"]["name"]
    router = documents("router.yaml")["Deployment"]["spec"]["template"]["spec"]
    assert router["serviceAccountName"] == account
    # Where the texts of errors send people.
    assert "deploy/kubernetes/rbac.yaml" in (ROOT / "router/discovery/kubernetes/api.py").read_text()


@pytest.mark.parametrize("page", ["docs/how-to/discovery.md", "docs/how-to/kubernetes.md"])
def test_the_pages_examples_are_what_the_router_takes(page: str) -> None:
    text = (ROOT / page).read_text()
    commands = re.findall(r"^kvrouter (serve(?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
    assert commands or page.endswith("kubernetes.md")
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        given: dict[str, Any] = {}
        for flag, value in zip(words[1::2], words[2::2], strict=True):
            name = {"--worker": "workers", "--allow-host": "allow_hosts"}.get(flag, flag[2:].replace("-", "_"))
            if name in ("workers", "allow_hosts"):
                given.setdefault(name, []).append(value)
            elif name != "config":
                given[name] = value
        config = load_config(None, {}, given)
        if config.kubernetes_api is not None:
            access_from(
                {}, api=config.kubernetes_api, namespace=config.kubernetes_namespace, token_file=None, ca_file=None
            )
    lists = re.findall(r"^```yaml\n(- .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert all(parse_workers(one, "example", FILE) for one in lists)
