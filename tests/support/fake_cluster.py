# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' API for pods over real HTTP: lists in pages, watches as chunked streams, bookmarks, 410, and faults.

What it answers is made after the API concepts of Kubernetes' documentation: every change has a resource version; a
watch reports what came after the version that it is given; versions that were compacted away are 410 Gone, as a status
or as an ERROR event.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from aiohttp import web

TOKEN = "the-token"
NAMESPACE = "serving"


def pod(
    name: str,
    ip: str | None = "10.0.0.5",
    *,
    ready: bool = True,
    phase: str = "Running",
    terminating: bool = False,
    labels: Mapping[str, str] = {"app": "vllm"},
    annotations: Mapping[str, str] | None = None,
    ports: Mapping[str, int] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod as the API shows it, with what it has besides what we read."""
    named = [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in (ports or {}).items()]
    metadata: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": dict(labels)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if terminating:
        metadata |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastProbeTime": None},
            {"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None},
        ],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "192.168.0.1"}
    container = {"name": "engine", "image": "vllm", "ports": named, "resources": {}}
    return {
        "metadata": metadata,
        "spec": {"containers": [container], "restartPolicy": "Always", **spec},
        "status": status,
    }


class FakeCluster:
    """Listens on entry. `asked` are the queries that came in."""

    def __init__(self) -> None:
        self.version = 100
        # Versions up to this are compacted away.
        self.compacted = 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.asked: list[dict[str, str]] = []
        # Instead of an answer: a status for lists, for watches, or all of them; and how long any answer waits.
        self.status: int | None = None
        self.watch_status: int | None = None
        self.delay_s = 0.0
        # The 410 of a watch as an ERROR event in its stream, as it comes for versions that expire later.
        self.gone_in_stream = False
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._watches: list[web.Request] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await self.listen(0)
        return self

    async def listen(self, port: int) -> None:
        assert self._runner is not None
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def refuse(self) -> None:
        """Nobody listens until `listen`."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.cut()
        await self._runner.cleanup()

    def cut(self) -> None:
        """All watches end with RST."""
        for request in list(self._watches):
            if request.transport is not None:
                request.transport.abort()

    @property
    def watches(self) -> int:
        return len(self._watches)

    async def put(self, *pods: dict[str, Any]) -> None:
        for one in pods:
            name = one["metadata"]["name"]
            await self._change("MODIFIED" if name in self.pods else "ADDED", one)

    async def delete(self, name: str) -> None:
        await self._change("DELETED", self.pods[name])

    async def bookmark(self) -> None:
        """Time goes on without a change to what is watched."""
        self.version += 10
        blank = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}, "spec": {}}
        await self._tell("BOOKMARK", {**blank, "status": {}})

    async def compact(self) -> None:
        """What was is forgotten: whoever is behind has to list again."""
        self.version += 1
        self.compacted = self.version
        self._history.clear()

    async def _change(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.pods[one["metadata"]["name"]]
        else:
            self.pods[one["metadata"]["name"]] = one
        await self._tell(kind, json.loads(json.dumps(one)))

    async def _tell(self, kind: str, one: dict[str, Any]) -> None:
        self._history.append((self.version, kind, one))
        async with self._changed:
            self._changed.notify_all()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        await asyncio.sleep(self.delay_s)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized")
        watching = query.get("watch") == "1"
        failing = self.watch_status if watching and self.watch_status else self.status
        if failing is not None:
            return status(failing, "pods is forbidden: User cannot list" if failing == 403 else "etcdserver: no leader")
        if request.match_info["namespace"] != NAMESPACE:
            return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []})
        return await self._watch(request, query) if watching else self._list(query)

    def _selected(self, one: dict[str, Any], selector: str) -> bool:
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        return wanted.items() <= one["metadata"]["labels"].items()

    def _list(self, query: dict[str, str]) -> web.Response:
        found = [one for _, one in sorted(self.pods.items()) if self._selected(one, query["labelSelector"])]
        begin = int(query.get("continue", "0"))
        end = begin + int(query.get("limit", "500"))
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if end < len(found):
            metadata |= {"continue": str(end), "remainingItemCount": len(found) - end}
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": found[begin:end]}
        )

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        at = int(query["resourceVersion"])
        if at < self.compacted and not self.gone_in_stream:
            return status(410, "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        self._watches.append(request)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(query["timeoutSeconds"])):
                    async for kind, one in self._events(at):
                        if kind == "BOOKMARK" or kind == "ERROR" or self._selected(one, query["labelSelector"]):
                            line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
                            # In two pieces, as it may come.
                            await response.write(line[: len(line) // 2])
                            await response.write(line[len(line) // 2 :])
                        if kind == "ERROR":
                            break
        finally:
            self._watches.remove(request)
        await response.write_eof()
        return response

    async def _events(self, at: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        while True:
            if at < self.compacted:
                yield (
                    "ERROR",
                    {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"},
                )
                return
            for version, kind, one in list(self._history):
                if version > at:
                    at = version
                    yield kind, one
            async with self._changed:
                while self.version <= at:
                    await self._changed.wait()


def status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code)
