# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' pods as workers. Pure. Source of the fields: Kubernetes API v1, Pod and PodStatus.

A worker's fields come from its pod as follows; the engine's answer completes a missing model. A label may stand in
place of an annotation.

- worker_id: the pod's name.
- url: the pod's IP and the port in annotation `kvrouter/port`, else the container port named `http`, else 8000.
- events, replay: the ports in annotations `kvrouter/events-port` and `kvrouter/replay-port`, else the container ports
  named `kv-events` and `kv-replay`. Without a port for events, the engine's answer names both; if the engine has no such
  path, the ports are 5557 and 5558.
- ranks: their number in annotation `kvrouter/dp-ranks`, with ports counted up, else the ranks of the engine's answer.
- peer: the pod's IP and the port in annotation `kvrouter/peer-port`.
- model, role, handover: annotations `kvrouter/model`, `kvrouter/role`, `kvrouter/handover`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.discovery.candidate import Candidate, ranked
from kvrouter.router.model.workers.engine_answers import Stream, bracketed
from kvrouter.router.model.workers.registration import UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.role import HandoverWay, Role, handover_problem, role_problem
from kvrouter.router.model.workers.source_precedence import KUBERNETES
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK, name_problem, peer_problem, worker_id_problem

PREFIX = "kvrouter/"

HTTP_PORT_NAME = "http"
EVENTS_PORT_NAME = "kv-events"
REPLAY_PORT_NAME = "kv-replay"
# The ports for HTTP and events are vLLM's defaults (config/kv_events.py); that for the replay is in its documentation.
HTTP_PORT = 8_000
EVENTS_PORT = 5_557
REPLAY_PORT = 5_558
MAX_PORT = 65_535

# The phases of a pod that will not run again.
ENDED_PHASES = ("Succeeded", "Failed")


class PodMetadata(msgspec.Struct, rename="camel"):
    """The fields of a pod's metadata that matter here."""

    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""


class _Port(msgspec.Struct, rename="camel"):
    container_port: int
    name: str | None = None


class _Container(msgspec.Struct, rename="camel"):
    ports: list[_Port] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] = []
    # Kubernetes lists sidecars here, which run beside the containers.
    init_containers: list[_Container] | None = None
    host_network: bool | None = None


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str


class _Status(msgspec.Struct, rename="camel"):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct, rename="camel"):
    """The fields of a pod that matter here."""

    metadata: PodMetadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class PodError(Exception):
    """An annotation, label or name that no worker can have. The message names it."""


def candidates_of(pod: Pod) -> list[Candidate]:
    """Return a candidate for each rank that the pod names, or one for all ranks.

    The list is empty while the pod has no address, and after it has ended.
    """
    host = pod.status.pod_ip
    if not host or pod.status.phase in ENDED_PHASES or not pod.metadata.name:
        return []
    try:
        ipaddress.ip_address(host)
        return _described(pod, host)
    except (PodError, ValueError) as error:
        worker = WorkerKey(UNKNOWN_MODEL, pod.metadata.name)
        problem = f"pod {pod.metadata.name}: {error}"
        return [Candidate(Registration(worker, source=KUBERNETES), any_rank=True, problem=problem)]


def _described(pod: Pod, host: str) -> list[Candidate]:
    """Return the candidates that the pod's metadata describe. Raises PodError."""
    metadata = {**(pod.metadata.labels or {}), **(pod.metadata.annotations or {})}
    ports = _named_ports(pod)
    http = _port(metadata, "port") or ports.get(HTTP_PORT_NAME, HTTP_PORT)
    events = _port(metadata, "events-port") or ports.get(EVENTS_PORT_NAME)
    replay = _port(metadata, "replay-port") or ports.get(REPLAY_PORT_NAME)
    peer_port = _port(metadata, "peer-port")
    if problem := worker_id_problem(pod.metadata.name):
        raise PodError(f"its name {problem}")
    model = metadata.get(PREFIX + "model", UNKNOWN_MODEL)
    if model and (problem := name_problem(model)):
        raise PodError(f"{PREFIX}model {problem}")
    role = metadata.get(PREFIX + "role", Role.BOTH)
    handover = metadata.get(PREFIX + "handover", HandoverWay.KV_TRANSFER_PARAMS)
    for name, problem in (("role", role_problem(role)), ("handover", handover_problem(handover))):
        if problem:
            raise PodError(f"{PREFIX}{name} {problem}")
    if peer_port is not None and (problem := peer_problem(f"{host}:{peer_port}", 0)):
        raise PodError(f"{PREFIX}peer-port {problem}")
    leaving = _leaving(pod)

    def at(port: int) -> str:
        return f"tcp://{bracketed(host)}:{port}"

    candidate = Candidate(
        Registration(
            WorkerKey(model, pod.metadata.name),
            url=f"http://{bracketed(host)}:{http}",
            events=None if events is None else at(events),
            replay=None if events is None or replay is None else at(replay),
            role=Role(role),
            handover=HandoverWay(handover),
            peer=None if peer_port is None else f"{host}:{peer_port}",
            retiring=bool(leaving),
            source=KUBERNETES,
            note=leaving,
        ),
        any_rank=True,
        # Only if the address is the pod's own: in the host's network another pod's engine may listen on these ports.
        fallback=None if pod.spec.host_network else Stream(at(EVENTS_PORT), at(replay or REPLAY_PORT)),
        only_known=bool(leaving),
    )
    ranks = _number(metadata, "dp-ranks", MAX_DP_RANK + 1)
    return [candidate] if ranks is None else ranked(candidate, ranks)


def _leaving(pod: Pod) -> str:
    """Return why the pod takes no new requests, or "" if it does."""
    if pod.metadata.deletion_timestamp is not None:
        return "its pod is terminating"
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions or ())
    return "" if ready else "its pod is not ready"


def _named_ports(pod: Pod) -> dict[str, int]:
    containers = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    return {port.name: port.container_port for container in containers for port in container.ports or () if port.name}


def _port(metadata: Mapping[str, str], name: str) -> int | None:
    return _number(metadata, name, MAX_PORT)


def _number(metadata: Mapping[str, str], name: str, most: int) -> int | None:
    """Return the number from 1 to `most` in an annotation or label, None if it is absent. Raises PodError."""
    text = metadata.get(PREFIX + name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 1 <= int(text) <= most:
        raise PodError(f"{PREFIX}{name} is {text[:40]!r}: write a whole number, 1 to {most}")
    return int(text)
