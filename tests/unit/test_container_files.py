# SPDX-License-Identifier: Apache-2.0
"""What the container files promise and a reader can check."""

from __future__ import annotations

import fnmatch
import re
import tomllib

import pytest
from container_files import COMPOSE, ROOT, SERVICES, dockerfile, last

OUR_IMAGE = SERVICES["router"]["image"]


def test_every_image_is_pinned() -> None:
    images = [step.words()[0] for step in dockerfile() if step.name == "FROM"]
    images += [service["image"] for service in SERVICES.values()]
    for name in images:
        assert re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+\.\d+(-[a-z0-9.-]+)?", name), name
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert OUR_IMAGE.endswith(f":{version}")


def test_one_service_builds_the_image_and_the_others_never_pull_it() -> None:
    ours = [service for service in SERVICES.values() if service["image"] == OUR_IMAGE]
    assert len(ours) == 4
    assert ["build" in service for service in ours].count(True) == 1
    assert all(service["pull_policy"] in ("build", "never") for service in ours)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_and_watched(name: str) -> None:
    service = SERVICES[name]
    user, _, group = service["user"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    if service["image"] == OUR_IMAGE:
        assert service["user"] == last("USER").text
    else:
        assert "healthcheck" in service
    # The image's check is the router's; another command needs another.
    assert ("healthcheck" in service) != (name == "router")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert service["mem_limit"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= set(COMPOSE["volumes"])
    assert not {"privileged", "network_mode", "pid", "cap_add", "env_file"} & set(service)


def test_the_router_waits_for_healthy_services_and_only_it_reaches_the_store() -> None:
    conditions = {name: wanted["condition"] for name, wanted in SERVICES["router"]["depends_on"].items()}
    assert conditions == dict.fromkeys(set(SERVICES) - {"router"}, "service_healthy")
    assert {name for name, service in SERVICES.items() if "index" in service["networks"]} == {"valkey", "router"}
    assert COMPOSE["networks"]["index"]["internal"] is True
    assert "ports" not in SERVICES["valkey"]


def test_what_the_image_writes_outside_of_its_volumes_is_nothing() -> None:
    env = dict(word.split("=", 1) for step in dockerfile() if step.name == "ENV" for word in step.words())
    assert "volumes" not in SERVICES["router"], "its index is in the other store"
    assert env["PYTHONDONTWRITEBYTECODE"] == "1"


def test_no_secret_is_written_down() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("KEY|PASSWORD|TOKEN|SECRET", name):
                assert re.fullmatch(r"\$\{\w+:-\}", value), name
    assert not re.search(r"://[^/\s]*@", (ROOT / "docker-compose.yml").read_text())
    assert not [step for step in dockerfile() if re.search("KEY|PASSWORD|TOKEN|SECRET", step.text)]


def sent(path: str) -> bool:
    """Whether .dockerignore lets a file be sent to the builder: the last pattern decides that fits it or a folder
    above."""
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


def test_the_builder_gets_the_source_and_nothing_else() -> None:
    wanted = [
        word.rstrip("/")
        for step in dockerfile()
        if step.name == "COPY" and not step.text.startswith("--from")
        for word in step.words()[:-1]
    ]
    assert {"events", "router", "engine_patch", "simulator", "replay", "pyproject.toml", "setup.py"} <= set(wanted)
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
    assert not sent("router/matching/judge.cpython-311-x86_64-linux-gnu.so")
