# SPDX-License-Identifier: Apache-2.0
"""Promises of the container files that can be checked by reading them."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib

import pytest
import yaml

from tests.support.container_files import COMPOSE, ROOT, SERVICES, dockerfile, last

ROUTERS = ("router-0", "router-1")
REPLICAS = ("replica-0", "replica-1", "replica-2")
ENGINES = ("engine-cpu", "engine-gpu")
# These services post one registration, and end.
REGISTRATIONS = ("registration-cpu", "registration-gpu")
ENGINE_DOCKERFILE = (ROOT / "deploy/engine/Dockerfile").read_text()
OUR_IMAGE = SERVICES["router-0"]["image"]


def test_every_image_is_pinned() -> None:
    images = [step.words()[0] for step in dockerfile() if step.name == "FROM"]
    images += [service["image"] for service in SERVICES.values()]
    images += re.findall(r"^ARG \w+=(\S+)", ENGINE_DOCKERFILE, re.MULTILINE)
    images += [value for name in ENGINES for value in SERVICES[name]["build"].get("args", {}).values()]
    for name in images:
        assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z0-9.-]+)?", name), name
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert OUR_IMAGE.endswith(f":{version}")
    assert f"ARG ROUTER={OUR_IMAGE}\n" in ENGINE_DOCKERFILE
    # The chart's engines run the same vLLM image into which the patch is built here.
    chart = yaml.safe_load((ROOT / "deploy/helm/kvrouter/values.yaml").read_text())
    assert f"ARG VLLM={chart['engine']['image']}\n" in ENGINE_DOCKERFILE


def test_engines_copy_the_patch_from_where_the_image_has_it() -> None:
    (target,) = (
        words[words.index("--target") + 1]
        for step in dockerfile()
        if step.name == "RUN" and "--target" in (words := step.words())
    )
    assert f"--from=build {target} {target}" in [step.text for step in dockerfile() if step.name == "COPY"]
    assert f"COPY --from=router {target} {target}\n" in ENGINE_DOCKERFILE
    assert f"ENV PYTHONPATH={target}\n" in ENGINE_DOCKERFILE
    engine = (ROOT / "deploy/helm/kvrouter/templates/engine.yaml").read_text()
    assert f"command: [cp, -R, {target}/., /patch/]" in engine


def test_one_service_builds_the_image_and_the_others_never_pull_it() -> None:
    ours = [name for name, service in SERVICES.items() if service["image"] == OUR_IMAGE]
    assert set(ours) == {*ROUTERS, *REPLICAS, *REGISTRATIONS}
    assert [name for name in ours if "build" in SERVICES[name]] == ["router-0"]
    assert all(SERVICES[name]["pull_policy"] in ("build", "never") for name in ours)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["mem_limit"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    volumes = [volume.partition(":")[0] for volume in service.get("volumes", [])]
    assert {volume for volume in volumes if not volume.startswith("./")} <= set(COMPOSE["volumes"])
    assert all((ROOT / volume).exists() for volume in volumes if volume.startswith("./"))
    assert not {"privileged", "network_mode", "pid", "cap_add", "env_file"} & set(service)
    # The image's health check is the router's, so a service with another command needs another check.
    assert ("healthcheck" in service) != (name in ROUTERS)
    assert service["restart"] == ("on-failure" if name in REGISTRATIONS else "unless-stopped")
    if name in ENGINES:
        # vLLM's images run as root, and compile the code that they run.
        assert service["profiles"] == [name.partition("-")[2]]
        return
    user, _, group = service["user"].partition(":")
    assert int(user) > 0
    # The files of Grafana's image belong to root's group.
    assert int(group) > 0 or name == "grafana"
    if service["image"] == OUR_IMAGE:
        assert service["user"] == last("USER").text
    assert service["read_only"] is True


def test_the_routers_wait_for_healthy_services_and_only_they_reach_the_store() -> None:
    for name in ROUTERS:
        conditions = {needed: wanted["condition"] for needed, wanted in SERVICES[name]["depends_on"].items()}
        assert conditions == dict.fromkeys({"valkey", *REPLICAS}, "service_healthy")
    assert {name for name, service in SERVICES.items() if "index" in service["networks"]} == {"valkey", *ROUTERS}
    assert COMPOSE["networks"]["index"]["internal"] is True
    assert "ports" not in SERVICES["valkey"]
    assert {name for name, service in SERVICES.items() if "profiles" in service} == {*ENGINES, *REGISTRATIONS}


def test_prometheus_scrapes_both_routers_and_grafana_finds_dashboard_and_source() -> None:
    """Check the provisioning files by the fields that Grafana reads.

    Source: https://grafana.com/docs/grafana/latest/administration/provisioning
    """
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{name}:30000" for name in ROUTERS]}]
    folder, at, _ = SERVICES["prometheus"]["volumes"][0].split(":")
    assert f"--config.file={at}/prometheus.yaml" in SERVICES["prometheus"]["command"]
    assert all((ROOT / folder / rules).exists() for rules in config["rule_files"])
    mounts = dict(reversed(volume.split(":")[:2]) for volume in SERVICES["grafana"]["volumes"])
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = yaml.safe_load((provisioning / "dashboards/kvrouter.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    (shown,) = (path for at, path in mounts.items() if at.startswith(provider["options"]["path"]))
    dashboard = json.loads((ROOT / shown).read_text())
    # A provisioned dashboard has no `id` and no inputs: its data source is a variable.
    assert dashboard["uid"] and dashboard["title"] and dashboard.get("id") is None and "__inputs" not in dashboard
    variable = next(each for each in dashboard["templating"]["list"] if each["type"] == "datasource")
    assert variable["query"] == source["type"]
    used = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    assert used <= {f"${{{variable['name']}}}"}


def test_the_image_writes_only_to_its_volumes() -> None:
    env = dict(word.split("=", 1) for step in dockerfile() if step.name == "ENV" for word in step.words())
    assert all("volumes" not in SERVICES[name] for name in ROUTERS), "their index is in the other store"
    assert env["PYTHONDONTWRITEBYTECODE"] == "1"


def test_no_secret_is_written_down() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("KEY|PASSWORD|TOKEN|SECRET", name):
                assert re.fullmatch(r"\$\{\w+:-\}", value), name
    assert not re.search(r"://[^/\s]*@", (ROOT / "docker-compose.yml").read_text())
    assert not [step for step in dockerfile() if re.search("KEY|PASSWORD|TOKEN|SECRET", step.text)]


def sent(path: str) -> bool:
    """Return whether .dockerignore lets a file be sent to the builder.

    The last pattern that fits the file, or a folder above it, decides.
    """
    parts = path.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    result = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        anywhere = pattern.removeprefix("**/")
        tried = parts if anywhere != pattern else above
        if any(fnmatch.fnmatchcase(part, anywhere) for part in tried):
            result = line.startswith("!")
    return result


def test_the_builder_gets_only_the_source() -> None:
    wanted = [
        word.rstrip("/")
        for step in dockerfile()
        if step.name == "COPY" and not step.text.startswith("--from")
        for word in step.words()[:-1]
    ]
    assert {
        "client",
        "events",
        "router",
        "engine_patch",
        "simulator",
        "replay",
        "shadow",
        "pyproject.toml",
        "setup.py",
    } <= set(wanted)
    for name in wanted:
        assert (ROOT / name).exists()
        assert sent(f"{name}/api/workers.py" if (ROOT / name).is_dir() else name)
    for name in (
        ".git/config",
        ".env",
        "tests/unit/test_container_files.py",
        "kvrouter-data/valkey.sock",
        ".venv/bin/python",
    ):
        assert not sent(name)
    assert not sent("router/__pycache__/mirror.cpython-311.pyc")
    assert not sent("engine_patch/build/lib/kvrouter/engine_patch/plugin.py")
    assert not sent("engine_patch/hybrid_kv_engine_patch.egg-info/PKG-INFO")
    assert not sent("router/index/matching/judge.cpython-311-x86_64-linux-gnu.so")
