# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' API for pods over real HTTP: lists in pages, watches as chunked streams, bookmarks, 410, and faults.

The answers follow the page "API concepts" of Kubernetes' documentation: every change has a resource version; a watch
reports the changes after the version in its query; versions that were compacted away are 410 Gone, as a status or as
an ERROR event.
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
    """Return a pod as the API shows it, with more fields than the router reads."""
    container_ports = [
        {"name": port, "containerPort": number, "protocol": "TCP"} for port, number in (ports or {}).items()
    ]
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
    container = {"name": "engine", "image": "vllm", "ports": container_ports, "resources": {}}
    return {
        "metadata": metadata,
        "spec": {"containers": [container], "restartPolicy": "Always", **spec},
        "status": status,
    }


class FakeCluster:
    """A Kubernetes API server with one namespace, which listens from entry to exit."""

    def __init__(self) -> None:
        self.version = 100
        # Versions up to this are compacted away.
        self.compacted = 0
        self.pods: dict[str, dict[str, Any]] = {}
        # The query parameters of the requests so far.
        self.asked: list[dict[str, str]] = []
        # The error status of all requests, unless `watch_status` replaces it; None for real answers.
        self.status: int | None = None
        # The error status of watches; None: that of all requests.
        self.watch_status: int | None = None
        # Seconds before each answer.
        self.delay_s = 0.0
        # Whether a watch reports 410 as an ERROR event in its stream, as it does for versions that expire later.
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
        """Refuse connections until `listen`."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.cut()
        await self._runner.cleanup()

    def cut(self) -> None:
        """End all watches with RST."""
        for request in list(self._watches):
            if request.transport is not None:
                request.transport.abort()

    @property
    def watches(self) -> int:
        return len(self._watches)

    async def put(self, *pods: dict[str, Any]) -> None:
        for changed_pod in pods:
            name = changed_pod["metadata"]["name"]
            await self._change("MODIFIED" if name in self.pods else "ADDED", changed_pod)

    async def delete(self, name: str) -> None:
        await self._change("DELETED", self.pods[name])

    async def bookmark(self) -> None:
        """Let the resource version grow without a change to any pod, and send a bookmark to the watches."""
        self.version += 10
        blank = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}, "spec": {}}
        await self._tell("BOOKMARK", {**blank, "status": {}})

    async def compact(self) -> None:
        """Forget all changes so far; a watch from an earlier version has to list again."""
        self.version += 1
        self.compacted = self.version
        self._history.clear()

    async def _change(self, kind: str, changed_pod: dict[str, Any]) -> None:
        self.version += 1
        changed_pod["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.pods[changed_pod["metadata"]["name"]]
        else:
            self.pods[changed_pod["metadata"]["name"]] = changed_pod
        await self._tell(kind, json.loads(json.dumps(changed_pod)))

    async def _tell(self, kind: str, changed_object: dict[str, Any]) -> None:
        self._history.append((self.version, kind, changed_object))
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

    def _selected(self, listed_pod: dict[str, Any], selector: str) -> bool:
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        return wanted.items() <= listed_pod["metadata"]["labels"].items()

    def _list(self, query: dict[str, str]) -> web.Response:
        selected = [
            listed_pod
            for _, listed_pod in sorted(self.pods.items())
            if self._selected(listed_pod, query["labelSelector"])
        ]
        begin = int(query.get("continue", "0"))
        end = begin + int(query.get("limit", "500"))
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if end < len(selected):
            metadata |= {"continue": str(end), "remainingItemCount": len(selected) - end}
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": selected[begin:end]}
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
                    async for kind, changed_object in self._events(at):
                        if (
                            kind == "BOOKMARK"
                            or kind == "ERROR"
                            or self._selected(changed_object, query["labelSelector"])
                        ):
                            line = json.dumps({"type": kind, "object": changed_object}).encode() + b"\n"
                            # Two pieces, because a line may arrive in several chunks.
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
            for version, kind, changed_object in list(self._history):
                if version > at:
                    at = version
                    yield kind, changed_object
            async with self._changed:
                while self.version <= at:
                    await self._changed.wait()


def status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.json_response(body, status=code)
