# SPDX-License-Identifier: Apache-2.0
"""Workers from Kubernetes' API, against a server that answers like it (tests/support/fake_cluster.py).

No real API server was available.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.follow.discovery.kubernetes import api as cluster_api
from kvrouter.router.follow.discovery.kubernetes.access import Access, access_from
from kvrouter.router.follow.discovery.kubernetes.api import ClusterApi
from kvrouter.router.follow.discovery.kubernetes.source import KubernetesSource
from kvrouter.router.model.workers.registration import Registration
from tests.support.fake_cluster import NAMESPACE, TOKEN, FakeCluster, pod

TIMEOUT_S = 10.0


class Watching:
    """A running source, its cluster, and the problems that it reported."""

    def __init__(self, cluster: FakeCluster, source: KubernetesSource, token_file: Path) -> None:
        self.cluster = cluster
        self.source = source
        self.token_file = token_file
        self.problems: set[str] = set()

    def changed(self) -> None:
        self.problems.add(self.source.problem)

    @property
    def registrations(self) -> list[Registration]:
        return [candidate.registration for candidate in self.source.shown or ()]

    @property
    def names(self) -> list[str] | None:
        if self.source.shown is None:
            return None
        return [registration.worker.worker_id for registration in self.registrations]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_named(self, name: str) -> None:
        await self.until(lambda: name in (self.names or ()))

    async def until_names(self, *names: str) -> None:
        await self.until(lambda: self.names == list(names) and not self.source.problem)


@asynccontextmanager
async def watching(folder: Path, *pods: dict[str, Any], **faults: Any) -> AsyncIterator[Watching]:
    token = folder / "token"
    token.write_text(f"{TOKEN}\n")
    async with FakeCluster() as cluster, aiohttp.ClientSession() as session:
        await cluster.put(*pods)
        for name, value in faults.items():
            setattr(cluster, name, value)
        api = ClusterApi(session, Access(cluster.url, NAMESPACE, token), "app=vllm", rng=random.Random(1))
        watched = Watching(cluster, KubernetesSource(api, rng=random.Random(2), retry_s=0.05), token)
        task = asyncio.create_task(watched.source.run(watched.changed))
        try:
            yield watched
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pods_come_and_go(tmp_path: Path) -> None:
    other = pod("other", labels={"app": "web"})
    async with watching(tmp_path, pod("e-0"), other) as watched:
        await watched.until_names("e-0")
        await watched.cluster.put(pod("e-1", "10.0.0.6"), pod("third", labels={"app": "web"}))
        await watched.until_names("e-0", "e-1")
        await watched.cluster.put(pod("e-0", terminating=True))
        await watched.until(lambda: watched.registrations[0].retiring)
        assert watched.registrations[0].note == "its pod is terminating"
        await watched.cluster.delete("e-0")
        await watched.until_names("e-1")
        (query,) = [parameters for parameters in watched.cluster.asked if "watch" not in parameters]
        assert query == {"labelSelector": "app=vllm", "limit": "250"}


async def test_a_long_list_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "PAGE_PODS", 3)
    names = [f"e-{number}" for number in range(8)]
    async with watching(tmp_path, *map(pod, names)) as watched:
        await watched.until_names(*names)
        assert sum("watch" not in parameters for parameters in watched.cluster.asked) == 3


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_watch_too_far_behind_lists_again(tmp_path: Path, in_stream: bool) -> None:
    async with watching(tmp_path, pod("e-0"), pod("e-1"), gone_in_stream=in_stream) as watched:
        await watched.until_names("e-0", "e-1")
        await watched.until(lambda: watched.cluster.watches)
        del watched.cluster.pods["e-0"]
        await watched.cluster.compact()
        watched.cluster.cut()
        await watched.until_names("e-1")
        assert sum("watch" not in parameters for parameters in watched.cluster.asked) == 2


async def test_a_watch_continues_from_a_bookmark(tmp_path: Path) -> None:
    async with watching(tmp_path, pod("e-0")) as watched:
        await watched.until(lambda: watched.cluster.watches)
        await watched.cluster.bookmark()
        at = str(watched.cluster.version)
        # Wait until the bookmark has arrived, which nothing shows.
        await asyncio.sleep(0.2)
        watched.cluster.compacted = watched.cluster.version
        watched.cluster.cut()
        await watched.until(lambda: watched.cluster.asked[-1].get("resourceVersion") == at and watched.cluster.watches)
        await watched.cluster.put(pod("e-1"))
        await watched.until_names("e-0", "e-1")
        assert sum("watch" not in parameters for parameters in watched.cluster.asked) == 1


async def test_a_watch_that_is_cut_or_ends_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_api, "WATCH_S", (1, 1))
    async with watching(tmp_path, pod("e-0")) as watched:
        for number in range(1, 4):
            await watched.until(lambda: watched.cluster.watches)
            if number % 2:
                watched.cluster.cut()
            else:
                await watched.until(lambda: not watched.cluster.watches)
            await watched.cluster.put(pod(f"e-{number}"))
            await watched.until_named(f"e-{number}")
        assert watched.problems == {""}, "one cut is no outage"
        assert sum("watch" not in parameters for parameters in watched.cluster.asked) == 1


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            403,
            "the service account may not list pods in namespace 'serving' (403): give it a Role with get, list and watch of pods",
        ),
        (401, "the API server rejects the credentials (401)"),
        (500, "the API server answers 500 to list pods in namespace 'serving': etcdserver: no leader"),
        (429, "the API server answers 429"),
    ],
)
async def test_a_refusal_of_the_server_says_what_to_do(tmp_path: Path, status: int, words: str) -> None:
    async with watching(tmp_path, pod("e-0"), status=status) as watched:
        await watched.until(lambda: words in watched.source.problem)
        assert watched.source.shown is None
        watched.cluster.status = None
        await watched.until_names("e-0")


async def test_nothing_is_lost_while_the_server_is_away(tmp_path: Path) -> None:
    async with watching(tmp_path, pod("e-0"), pod("e-1")) as watched:
        await watched.until_names("e-0", "e-1")
        await watched.until(lambda: watched.cluster.watches)
        watched.cluster.status = 503
        watched.cluster.cut()
        await watched.until(lambda: "503 to watch pods" in watched.source.problem)
        assert watched.names == ["e-0", "e-1"]
        await watched.cluster.delete("e-0")
        watched.cluster.status = None
        await watched.until_names("e-1")


async def test_an_outage_of_the_connection_is_reported(tmp_path: Path) -> None:
    async with watching(tmp_path, pod("e-0")) as watched:
        await watched.until_names("e-0")
        await watched.until(lambda: watched.cluster.watches)
        port = int(watched.cluster.url.rpartition(":")[2])
        await watched.cluster.refuse()
        watched.cluster.cut()
        await watched.until(lambda: "cannot be reached" in watched.source.problem)
        assert watched.names == ["e-0"]
        await watched.cluster.put(pod("e-1"))
        await watched.cluster.listen(port)
        await watched.until_names("e-0", "e-1")


async def test_a_slow_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "LIST_TIMEOUT_S", 0.2)
    async with watching(tmp_path, pod("e-0"), delay_s=1.0) as watched:
        await watched.until(lambda: "did not answer" in watched.source.problem)
        watched.cluster.delay_s = 0.0
        await watched.until_names("e-0")


async def test_a_token_that_was_exchanged_is_read_again(tmp_path: Path) -> None:
    async with watching(tmp_path, pod("e-0")) as watched:
        await watched.until_names("e-0")
        await watched.until(lambda: watched.cluster.watches)
        watched.token_file.write_text("expired")
        watched.cluster.cut()
        await watched.until(lambda: "401" in watched.source.problem)
        watched.token_file.unlink()
        await watched.until(lambda: "kubernetes_token_file" in watched.source.problem)
        os.mkfifo(watched.token_file)
        await watched.until(lambda: "not a regular file" in watched.source.problem)
        watched.token_file.unlink()
        watched.token_file.write_text(TOKEN)
        await watched.until_names("e-0")


def test_the_address_of_the_api_comes_from_the_routers_pod(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"api": None, "namespace": None, "token_file": None, "ca_file": None}
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    (tmp_path / "namespace").write_text("serving\n")
    inside = access_from(environ, **nothing, account=tmp_path)
    assert inside == Access("https://[fd00::1]:6443", "serving", tmp_path / "token", tmp_path / "ca.crt")
    outside = access_from({}, **(nothing | {"api": "http://127.0.0.1:8001/", "namespace": "n"}), account=tmp_path)
    assert outside == Access("http://127.0.0.1:8001", "n")
    with pytest.raises(SettingError, match="set kubernetes_api"):
        access_from({}, **nothing, account=tmp_path)
    with pytest.raises(SettingError, match="kubernetes_namespace is missing"):
        access_from(environ, **nothing, account=tmp_path / "none")
