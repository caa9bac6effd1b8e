# SPDX-License-Identifier: Apache-2.0
"""The settings of one router process: one struct, filled from a YAML file, the environment and flags.

A later source overrides an earlier one: default, file, `KVROUTER_*`, flag. `loading.py` reads them; this module does no
I/O.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvrouter.router.base.common.host_list import HOST_FORM
from kvrouter.router.base.common.redaction import HIDDEN, redacted
from kvrouter.router.model.workers.allow_list import FORM

ENV_PREFIX = "KVROUTER_"


SECRETS = ("api_key", "worker_api_key")

# The usual port of endpoint pickers of the Gateway API Inference Extension.
EPP_PORT = 9_002

# Types that several settings share.
File = Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(extra={"metavar": "FILE"})]
Key = Annotated[Annotated[str, Meta(pattern=r"^[\x21-\x7e]+$(?!\n)")] | None, Meta(extra={"metavar": "KEY"})]
# Links that the page shows. Other schemes are refused, because a javascript: link would run in the page.
Link = Annotated[str, Meta(pattern=r"^https?://[^\s<>]+$(?!\n)")] | None
TraceLink = Annotated[str, Meta(pattern=r"^https?://[^\s<>]*\{(trace_id|request_id)\}[^\s<>]*$(?!\n)")] | None
Switch = Annotated[Literal["off", "on"], Meta(extra={"metavar": "off|on"})]


def setting(
    description: str, *, metavar: str | None = None, flag: str | None = None, reloads: bool = False, **limits: Any
) -> Meta:
    """Return the metadata of a setting.

    Args:
        description: What to write, as the help and error messages show it.
        metavar: The placeholder for a value in the help; None: that of the type, or `S` for seconds and else `N`.
        flag: The flag; None: it follows from the name.
        reloads: Whether a change in the settings file is applied without a restart.
        limits: The limits of a number or of a text's length, as `msgspec.Meta` names them.
    """
    extra = {name: value for name, value in (("metavar", metavar), ("flag", flag), ("reloads", reloads)) if value}
    return Meta(description=description, extra=extra or None, **limits)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router process.

    The `description` of a field is the help of its flag, and error messages say to write it.
    """

    # The default is loopback, because a router without an API key must be open to the network only on purpose.
    host: Annotated[str, setting("an address to listen on, like 0.0.0.0", metavar="HOST", min_length=1)] = "127.0.0.1"
    # The default is the port that users of other routers know.
    port: Annotated[int, setting("a port, 0 to 65535; 0 takes a free one", metavar="PORT", ge=0, le=65_535)] = 30_000
    tls_certificate: Annotated[
        File,
        setting("the PEM file with the certificate chain of port, read again when it changes; without it, plain text"),
    ] = None
    tls_key: Annotated[File, setting("the PEM file with the key of tls_certificate")] = None
    tls_client_ca: Annotated[
        File,
        setting(
            "the PEM file with the authorities of clients, which then must show a certificate; without it, they need none"
        ),
    ] = None
    # `serve` has none by default, because the port needs the extra `gateway`. The default of `kvrouter epp` is EPP_PORT.
    gateway_port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        setting(
            "a port, 0 to 65535, where gateways ask for endpoints over gRPC (the health service is there too); without it, "
            "none",
            metavar="PORT",
        ),
    ] = None
    gateway_certificate: Annotated[
        File,
        setting(
            "the PEM file with the certificate chain of gateway_port, read again when it changes; without it, plain text"
        ),
    ] = None
    gateway_key: Annotated[File, setting("the PEM file with the key of gateway_certificate")] = None
    gateway_client_ca: Annotated[
        File,
        setting(
            "the PEM file with the authorities of gateways, which then must show a certificate; without it, they need none"
        ),
    ] = None
    # The default is 0, because an ORIGINAL_DST cluster accepts one address, and answers 503 to a list.
    gateway_fallbacks: Annotated[
        int,
        setting(
            "0 to 8: endpoints named behind the picked one, for gateways that try the next when one fails", ge=0, le=8
        ),
    ] = 0
    # The picker sees the client's body, and cannot see that the engine gets another one.
    gateway_translated_paths: Annotated[
        tuple[str, ...],
        setting(
            "a list of paths like /v1/messages whose requests the gateway translates into another API after the pick: "
            "the tokens of their prompts are a guess, so nothing is predicted for them",
            metavar="PATH",
            flag="--gateway-translated-path",
        ),
    ] = ()
    redis: Annotated[
        str | None,
        setting(
            "a URL like redis://host:6379/0, redis+cluster://host:6379 or redis+sentinel://host:26379,host:26379/service; "
            "without it, a private server is started",
            metavar="URL",
        ),
    ] = None
    data_dir: Annotated[
        str, setting("the folder in which the private server keeps its data", metavar="DIR", min_length=1)
    ] = "./kvrouter-data"
    workers: Annotated[
        tuple[str | dict[str, Any], ...],
        setting(
            "a list of [ID=]HTTP_URL[,events=tcp://H:P][,replay=tcp://H:P][,model=NAME][,dp_rank=N]",
            metavar="SPEC",
            flag="--worker",
            reloads=True,
        ),
    ] = ()
    workers_file: Annotated[File, setting("a YAML or JSON file that lists workers, watched for changes")] = None
    # Without a selector, Kubernetes is not used. The other Kubernetes settings are for a router outside the cluster.
    kubernetes_selector: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        setting("a label selector like app=vllm; the selected pods are workers", metavar="SELECTOR"),
    ] = None
    kubernetes_namespace: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$(?!\n)")] | None,
        setting("the namespace of the pods; without it, the router's own", metavar="NAME"),
    ] = None
    kubernetes_api: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$(?!\n)")] | None,
        setting("the URL of Kubernetes' API; without it, that of the cluster that the router runs in", metavar="URL"),
    ] = None
    kubernetes_token_file: Annotated[
        File, setting("the file with the token; without it, the service account's in a pod")
    ] = None
    kubernetes_ca_file: Annotated[
        File, setting("the CA certificates of the API server; without it, the cluster's in a pod")
    ] = None
    # An empty list allows all hosts: engines come and go under addresses that only the operator knows, and the API key
    # and the loopback default already limit who may register. If not all clients with the key are trusted, list the
    # engines' networks.
    allow_hosts: Annotated[
        tuple[str, ...],
        setting(
            f"a list of where workers may be: {FORM}; without it, anywhere but at link-local addresses",
            metavar="HOST",
            flag="--allow-host",
        ),
    ] = ()
    # Without an API key, only the network protects the router. A web page in a browser inside that network must not be
    # able to pose as a page of the router (DNS rebinding).
    allowed_hosts: Annotated[
        tuple[str, ...],
        setting(
            f"a list of what clients may call this router where it has no API key: {HOST_FORM}; localhost always, and any IP "
            "address where host is not loopback",
            metavar="HOST",
            flag="--allowed-host",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#@\s,*]+)$(?!\n)")], ...],
        setting(
            "a list of origins like https://app.example whose scripts may read answers in a browser, or * for all; without "
            "it, none",
            metavar="ORIGIN",
            flag="--cors-origin",
        ),
    ] = ()
    processes: Annotated[
        int, setting("1 to 64: router processes behind one port; each keeps the index in memory", ge=1, le=64)
    ] = 1
    api_key: Annotated[Key, setting("a key of printable ASCII, without spaces")] = None
    api_keys_file: Annotated[
        File, setting("a YAML or JSON file that lists further API keys with their scopes, read again when it changes")
    ] = None
    # With salts that clients choose, a client without one learns by hits what other clients have sent.
    cache_salt_secret_file: Annotated[
        File,
        setting(
            "the file with a secret of at least 32 bytes, read again when it changes, from which the router makes the cache "
            "salt of each tenant: of each API key, or of each name in tenant_header; without it, clients name their salts"
        ),
    ] = None
    # A client that separates its own users by salts needs `combine`.
    client_salts: Annotated[
        Literal["ignore", "combine"],
        setting(
            "ignore or combine: whether a client's own cache_salt is replaced by the tenant's, or divides the tenant's cache",
            metavar="ignore|combine",
        ),
    ] = "ignore"
    # Anybody may send a header, so it counts only from clients that the operator trusts.
    tenant_header: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$(?!\n)")] | None,
        setting(
            "a header in lower case, like x-tenant, in which a trusted gateway names the tenant of each request: one whose "
            "API key has names_tenants, any client of a router without keys, and the gateway at gateway_port",
            metavar="NAME",
        ),
    ] = None
    # The header shows a client how much of its prompt other clients have sent before, so it can be turned off.
    predicted_hit_header: Annotated[
        Switch, setting("on or off: whether answers to proxied requests have x-kvrouter-predicted-hit")
    ] = "on"
    # The default is enough for a thousand engines that each register again every ten seconds. `access.BURST_SHARE`
    # times max_workers is the burst for workers that start at the same time.
    registrations_per_s: Annotated[
        float,
        setting(
            "0 to 100000: registrations and withdrawals of workers each second by each API key, after a burst of four times "
            "max_workers; 0: no limit",
            metavar="N",
            reloads=True,
            ge=0.0,
            le=100_000.0,
        ),
    ] = 100.0
    # An engine connects to the address that a request names, so only the operator can allow clients to name one.
    trust_client_kv_sources: Annotated[
        Switch,
        setting(
            "on or off: whether clients may name the engine from which another one fetches blocks (kv_transfer_params."
            "remote_kv_source and its like, kv_hints); off: these fields are removed"
        ),
    ] = "off"
    # If this router has an API key, a client's Authorization header is for the router; otherwise it is passed on to the
    # engine.
    worker_api_key: Annotated[
        Key,
        setting(
            "the engines' API key (printable ASCII, no spaces), sent to hosts that allow_hosts lists and to workers of the "
            "settings",
            reloads=True,
        ),
    ] = None
    worker_api_keys_file: Annotated[
        File,
        setting(
            "a YAML or JSON file with further keys of engines, lines like NAME: KEY, read again when it changes; a worker's "
            "engine_key names one, and the one named default is for the others, in place of worker_api_key"
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("debug, info, warning or error", metavar="LEVEL")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], setting("text or json", metavar="FORMAT")] = "text"
    # Off by default, because one line per request is too much if nobody reads it.
    access_log: Annotated[Switch, setting("off or on: one line in the log for each proxied request")] = "off"
    documentation_url: Annotated[
        Link, setting("the http or https URL of the documentation, to which the page links", metavar="URL")
    ] = None
    grafana_url: Annotated[
        Link, setting("the http or https URL of a dashboard, to which the page links", metavar="URL")
    ] = None
    trace_url: Annotated[
        TraceLink,
        setting(
            "the http or https URL of a request's trace with {trace_id} or {request_id} in it, to which the page links",
            metavar="URL",
        ),
    ] = None
    # How long net changes are collected before a commit. With 2 ms a commit has 256 changes or more at 100 k blocks/s
    # (0.8 M transitions/s measured); with more than 10 ms the answers would lag visibly behind the engines.
    flush_interval_s: Annotated[
        float, setting("seconds, 0 to 0.010: how long changes wait for a commit", ge=0.0, le=0.010)
    ] = 0.002
    # 2 GiB holds some tens of millions of (worker, block) entries: a fleet of 100 engines with 256 k blocks each.
    mirror_budget_bytes: Annotated[
        int, setting("bytes, at least 16777216: memory limit of the index", ge=16 * 1024**2)
    ] = 2 * 1024**3
    # A remembered segment need not be hashed again (1 ms for 8 k tokens); 256 MiB hold tens of millions of tokens.
    segment_memory_bytes: Annotated[int, setting("bytes, 0 or more: size of the cache of prompt hashes", ge=0)] = (
        256 * 1024**2
    )
    # A prompt of 1 M tokens is 7 MB of JSON. 32 MiB is more than enough, and limits the memory that one client can make
    # the router hold.
    max_body_bytes: Annotated[int, setting("bytes, at least 1024: the largest request body", ge=1024)] = 32 * 1024**2
    # How long a dead router's workers stay without ingest: other routers notice its end, and its free leases, after
    # this time and two looks, which take a tenth of it each. With 2 s, takeovers on a busy machine took too close to 3 s
    # (2.6 to 3.5 s measured). A lease is renewed five times in this period, so a router must stand still for over a
    # second to lose a worker. Another router then takes the worker over, and no data is lost.
    lease_ttl_s: Annotated[
        float,
        setting("seconds, 0.5 to 300: lease of a worker; a dead router's workers move after it", ge=0.5, le=300.0),
    ] = 1.5
    # A cut connection is back within one or two seconds, and events of a patched engine arrive again within three. A
    # restarted engine needs longer than this period to load its weights. So during the period, the last known residency
    # is most likely still true.
    suspect_credit_s: Annotated[
        float, setting("seconds, 0 to 3600: how long a suspect worker keeps its credit", ge=0.0, le=3600.0)
    ] = 10.0
    # The default holds an hour of three requests per second; users ask soon why a request went to its worker.
    decisions_kept: Annotated[
        int, setting("0 to 1000000: decisions that GET /decisions explains later", ge=0, le=1_000_000)
    ] = 10_000
    # The cache of a busy engine turns over in a few minutes; other routers of this kind have the same default.
    approximate_ttl_s: Annotated[
        float,
        setting(
            "seconds, 0 to 86400: how long a prompt counts as cached at a worker without usable events",
            ge=0.0,
            le=86_400.0,
        ),
    ] = 120.0
    # A fleet notices a dead replica within a second; an engine answers /health in under a millisecond.
    health_interval_s: Annotated[
        float, setting("seconds, 0 to 3600: interval of engine health checks; 0 turns them off", ge=0.0, le=3600.0)
    ] = 1.0
    # The default is the time that OpenAI's own client waits. The first byte of an answer that is not streamed comes
    # after its last token, so it takes long; health checks notice an engine that hangs within seconds.
    answer_timeout_s: Annotated[
        float,
        setting(
            "seconds, over 0 to 86400: how long an engine may send nothing, before or within an answer",
            reloads=True,
            gt=0.0,
            le=86_400.0,
        ),
    ] = 600.0
    # Kubernetes sends SIGKILL after 30 s by default. A little less lets the router cut the remaining requests in order.
    drain_s: Annotated[
        int,
        setting(
            "whole seconds, 0 to 86400: how long running requests may take to finish after SIGTERM", ge=0, le=86_400
        ),
    ] = 25
    # The default is 0, so that a user who stops the router at a terminal need not wait. Behind a load balancer, set the
    # time that the balancer takes to notice the end: a few seconds for Kubernetes' endpoints.
    shutdown_delay_s: Annotated[
        float,
        setting(
            "seconds, 0 to 3600: how long new connections are accepted after SIGTERM, while /ready answers 503",
            ge=0.0,
            le=3600.0,
        ),
    ] = 0.0
    # vLLM answers a full ring (10,000 batches) in well under a second; a lost answer must not hold a worker for long.
    replay_timeout_s: Annotated[
        float, setting("seconds, over 0 to 60: how long to wait for a replay", gt=0.0, le=60.0)
    ] = 5.0
    # The default is the policy for use; the others exist for comparison.
    policy: Annotated[
        Literal["kv", "round_robin", "least_load", "random", "prefix_only", "full_attention_only"],
        setting(
            "kv (least cost), or for comparison: round_robin, least_load, random, prefix_only, full_attention_only",
            metavar="NAME",
        ),
    ] = "kv"
    # Random choices cost reuse, but they spread load if the costs are known to be wrong.
    temperature: Annotated[
        float,
        setting("0 to 10: sampling temperature of policy kv; 0 randomises ties only", metavar="T", ge=0.0, le=10.0),
    ] = 0.0
    # The default is a few seconds of an engine's work, so that the engine never runs out of work. A further prompt would
    # gain nothing in the engine's queue, while from the router's queue it can go to the first free worker.
    saturation_tokens: Annotated[
        int,
        setting(
            "tokens, at least 1: queued prefill above which a worker gets no more prompts", reloads=True, ge=1, le=2**40
        ),
    ] = 131_072
    # A shorter prompt takes longer to hand over than to compute (`prefill_split.HANDOVER_TOKENS`), even if the prefill
    # worker is idle. Handing it over would pay only if prompts queue at the decode worker, and short prompts are not the
    # bulk of such a queue.
    remote_prefill_min_tokens: Annotated[
        int,
        setting(
            "tokens, 0 or more: prompts with fewer uncached tokens are prefilled by their decode worker", ge=0, le=2**40
        ),
    ] = 1_024
    # An 8 B model has 128 KiB per token. RDMA with 200 Gb/s (25 GB/s) transfers 190,000 tokens/s, while an H100 computes
    # some 30,000 to 40,000. With 25 Gb/s Ethernet the cost is more than 1.
    handover_token_cost: Annotated[
        float,
        setting(
            "0 to 100: cost of transferring a token to the decode worker, in computed tokens",
            metavar="COST",
            ge=0.0,
            le=100.0,
        ),
    ] = 0.2
    # Pulls take the network between engines. Where they do harm, an operator must be able to stop them at once, without a
    # restart of engines or routers.
    peer_pulls: Annotated[
        Switch,
        setting(
            "on or off: whether engines that lend blocks are made to fetch from each other (docs/how-to/offload.md)",
            reloads=True,
        ),
    ] = "on"
    # Engine patches that list the clients they admit recognise a router by this key.
    curve_client_key: Annotated[
        File,
        setting(
            "the file with this router's secret CURVE key, for patches that list their clients; without it, another for each "
            "connection"
        ),
    ] = None
    # Each waiting prompt holds its connection and its body.
    queue_size: Annotated[
        int,
        setting("0 to 100000: prompts that may wait while all workers are saturated", reloads=True, ge=0, le=100_000),
    ] = 1_024
    # Clients and load balancers give up after a minute.
    queue_deadline_s: Annotated[
        float,
        setting("seconds, 0 to 3600: how long a prompt waits for a worker", reloads=True, ge=0.0, le=3600.0),
    ] = 30.0
    # Each worker has its own sockets, task and tables; fleets have tens to hundreds of workers. Without a limit, a
    # client that registers workers in a loop would use up all file descriptors of the process.
    max_workers: Annotated[int, setting("1 to 6000: how many workers (ranks) this router follows", ge=1, le=6_000)] = (
        1_024
    )
    # Without a tokenizer, the engines tokenize. The result is exact for every engine, at the cost of a round trip and
    # some work of the engine.
    tokenizers: Annotated[
        tuple[str, ...],
        setting(
            "a list of MODEL=FOLDER with its tokenizer.json; without one, the model's engines tokenize",
            metavar="MODEL=FOLDER",
            flag="--tokenizer",
        ),
    ] = ()
    # For engines that return no tokens themselves, and to take that work off engines that do.
    renderers: Annotated[
        tuple[str, ...],
        setting(
            "a list of MODEL=URL[,key=NAME]: servers like vllm launch render that return a model's tokens; key names their "
            "API key in worker_api_keys_file",
            metavar="MODEL=URL[,key=NAME]",
            flag="--renderer",
        ),
    ] = ()
    # A request waits for its tokens at most this long; after that it can only be placed by load. An engine renders a
    # chat in a few milliseconds, and tens of thousands of tokens in tens of milliseconds; an engine that takes more than
    # a second is overloaded.
    tokenize_timeout_s: Annotated[
        float,
        setting("seconds, over 0 to 60: time limit for tokenizing a prompt", reloads=True, gt=0.0, le=60.0),
    ] = 1.0
    model_aliases: Annotated[
        tuple[str, ...],
        setting(
            "a list of NAME=MODEL: other names for models and LoRA adapters",
            metavar="NAME=MODEL",
            flag="--model-alias",
            reloads=True,
        ),
    ] = ()
    # Off by default, because a trace costs about 150 us of CPU per request and needs a collector. This setting turns
    # tracing on and names the collector; the SDK's own variables (OTEL_*) control the rest.
    otlp_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[\x21-\x7e]+$(?!\n)")] | None,
        setting("a collector's URL like http://otel:4318 (OTLP over HTTP); without it, no traces", metavar="URL"),
    ] = None
    # None means that the engines run without PYTHONHASHSEED, as they do by default.
    none_hash_seed: Annotated[
        str | None, setting("the engines' PYTHONHASHSEED; omit it if they have none", metavar="SEED")
    ] = None

    def shown(self) -> dict[str, Any]:
        """Return the settings without secrets and without passwords in URLs."""
        shown: dict[str, Any] = redacted(msgspec.to_builtins(self))
        for name in ("redis", "otlp_endpoint"):
            if shown[name] is not None:
                shown[name] = without_password(shown[name])
        return shown


FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}


# Settings that are lists. Each use of a flag gives one value. In the environment, white space separates the values,
# because no value contains any.
LISTS = frozenset(name for name, field in FIELDS.items() if field.default == ())


def reloads(name: str) -> bool:
    """Return whether a change of setting `name` in the settings file is applied without a restart."""
    return bool(_extra(name).get("reloads"))


def describe(name: str) -> str:
    """Return the description of setting `name`, which its help and its error messages show."""
    return str((_metadata(name).extra_json_schema or {}).get("description", ""))


def flag_of(name: str) -> str:
    """Return the flag that sets setting `name`."""
    return str(_extra(name).get("flag") or f"--{name.replace('_', '-')}")


def metavar_of(name: str) -> str:
    """Return the placeholder for a value of setting `name` in the help."""
    return str(_extra(name).get("metavar") or ("S" if name.endswith("_s") else "N"))


def _extra(name: str) -> dict[str, Any]:
    return _metadata(name).extra or {}


def _metadata(name: str) -> msgspec.inspect.Metadata:
    info = msgspec.inspect.type_info(FIELDS[name].type)
    assert isinstance(info, msgspec.inspect.Metadata), f"setting {name} has no description"
    return info


# The settings whose changes in the settings file are applied without a restart: those that are read at each use.
# Settings that size something at the start, or on which other settings depend, are not among them.
RELOADS = frozenset(name for name in FIELDS if reloads(name))


def variable_of(name: str) -> str:
    """Return the environment variable of setting `name`."""
    return ENV_PREFIX + name.upper()


def without_password(url: str) -> str:
    """Return a URL with its passwords hidden, as in `redis://***@host`.

    It hides the text before the last `@`, and all text after `sentinel_password=`, because a password may contain any
    of `/@?#&` unescaped.
    """
    hidden = re.sub(r"(sentinel_password=).*", rf"\1{HIDDEN}", url, flags=re.DOTALL)
    return re.sub(r"(//).*@", rf"\1{HIDDEN}@", hidden, flags=re.DOTALL)
