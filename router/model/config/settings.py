# SPDX-License-Identifier: Apache-2.0
"""The settings of one router process: one struct, filled from a YAML file, the environment and flags.

Later sources win: default, file, `KVROUTER_*`, flag. Whatever is unknown or wrong raises SettingError with one line
that says what is wrong and what to write instead. Nothing here does I/O but reading the named file.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from kvrouter.router.base.common.host_list import HOST_FORM
from kvrouter.router.model.workers.allow_list import FORM

ENV_PREFIX = "KVROUTER_"


SECRETS = ("api_key", "worker_api_key")

# Where the endpoint pickers of the Gateway API Inference Extension listen.
EPP_PORT = 9_002

# Stands for a secret wherever settings are shown.
HIDDEN = "***"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router process. Their `description` is also the help of their flag and what errors say to
    write."""

    # Loopback: a router without an API key must not be open to the network unless someone says so.
    host: Annotated[
        str, msgspec.Meta(min_length=1, extra={"metavar": "HOST"}, description="an address to listen on, like 0.0.0.0")
    ] = "127.0.0.1"
    # The port that users of other routers know.
    port: Annotated[
        int,
        msgspec.Meta(ge=0, le=65_535, extra={"metavar": "PORT"}, description="a port, 0 to 65535; 0 takes a free one"),
    ] = 30_000
    tls_certificate: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="the PEM file with the certificate chain of port, read again when it changes; without it, plain text",
        ),
    ] = None
    tls_key: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(extra={"metavar": "FILE"}, description="the PEM file with the key of tls_certificate"),
    ] = None
    tls_client_ca: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="the PEM file with the authorities of clients, which then must show a certificate; without it, they "
            "need none",
        ),
    ] = None
    # Off in `serve`: it needs the extra `gateway`. `kvrouter epp` takes EPP_PORT.
    gateway_port: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None,
        msgspec.Meta(
            extra={"metavar": "PORT"},
            description="a port, 0 to 65535, where gateways ask for endpoints over gRPC (the health service is there too); "
            "without it, none",
        ),
    ] = None
    gateway_certificate: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="the PEM file with the certificate chain of gateway_port, read again when it changes; without it, "
            "plain text",
        ),
    ] = None
    gateway_key: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(extra={"metavar": "FILE"}, description="the PEM file with the key of gateway_certificate"),
    ] = None
    gateway_client_ca: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="the PEM file with the authorities of gateways, which then must show a certificate; without it, they "
            "need none",
        ),
    ] = None
    # An ORIGINAL_DST cluster takes one address, and answers 503 to a list.
    gateway_fallbacks: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=8,
            description="0 to 8: endpoints named behind the picked one, for gateways that try the next when one fails",
        ),
    ] = 0
    redis: Annotated[
        str | None,
        msgspec.Meta(
            extra={"metavar": "URL"},
            description="a URL like redis://host:6379/0, redis+cluster://host:6379 or "
            "redis+sentinel://host:26379,host:26379/service; without it, a private server is started",
        ),
    ] = None
    data_dir: Annotated[
        str,
        msgspec.Meta(
            min_length=1, extra={"metavar": "DIR"}, description="the folder in which the private server keeps its data"
        ),
    ] = "./kvrouter-data"
    workers: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            extra={"metavar": "SPEC", "flag": "--worker"},
            description="a list of ID=HTTP_URL[,events=tcp://H:P][,replay=tcp://H:P][,model=NAME][,dp_rank=N]",
        ),
    ] = ()
    workers_file: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"}, description="a YAML or JSON file that lists workers, watched for changes"
        ),
    ] = None
    # Without one, Kubernetes is not used. The others say where it is, for a router that does not run in the cluster
    # itself.
    kubernetes_selector: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "SELECTOR"},
            description="a label selector like app=vllm; the selected pods are workers",
        ),
    ] = None
    kubernetes_namespace: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$(?!\n)")] | None,
        msgspec.Meta(extra={"metavar": "NAME"}, description="the namespace of the pods; without it, the router's own"),
    ] = None
    kubernetes_api: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$(?!\n)")] | None,
        msgspec.Meta(
            extra={"metavar": "URL"},
            description="the URL of Kubernetes' API; without it, that of the cluster that the router runs in",
        ),
    ] = None
    kubernetes_token_file: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"}, description="the file with the token; without it, the service account's in a pod"
        ),
    ] = None
    kubernetes_ca_file: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="the CA certificates of the API server; without it, the cluster's in a pod",
        ),
    ] = None
    # Empty allows all: engines come and go under addresses that only the operator knows, and who may register is
    # bounded by the API key and the loopback default already. Where clients with the key are not all trusted, list the
    # engines' networks.
    allow_hosts: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            extra={"metavar": "HOST", "flag": "--allow-host"},
            description=f"a list of where workers may be: {FORM}; without it, anywhere but at link-local addresses",
        ),
    ] = ()
    # Without a key, only the network protects the router. A web page in a browser inside that network must not pass for
    # a page of the router (DNS rebinding).
    allowed_hosts: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            extra={"metavar": "HOST", "flag": "--allowed-host"},
            description=f"a list of what clients may call this router where it has no API key: {HOST_FORM}; localhost always, and "
            "any IP address where host is not loopback",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#@\s,*]+)$(?!\n)")], ...],
        msgspec.Meta(
            extra={"metavar": "ORIGIN", "flag": "--cors-origin"},
            description="a list of origins like https://app.example whose scripts may read answers in a browser, or * "
            "for all; without it, none",
        ),
    ] = ()
    processes: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=64, description="1 to 64: router processes behind one port; each keeps the index in memory"
        ),
    ] = 1
    api_key: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]+$(?!\n)")] | None,
        msgspec.Meta(extra={"metavar": "KEY"}, description="a key of printable ASCII, without spaces"),
    ] = None
    api_keys_file: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="a YAML or JSON file that lists further API keys with their scopes, read again when it changes",
        ),
    ] = None
    # A client learns from this header how much of its prompt others have sent before.
    predicted_hit_header: Annotated[
        Literal["off", "on"],
        msgspec.Meta(
            extra={"metavar": "off|on"},
            description="on or off: whether answers to proxied requests have x-kvrouter-predicted-hit",
        ),
    ] = "on"
    # Enough for a fleet of a thousand engines that each register again every ten seconds. `access.BURST_SHARE` is the
    # burst for workers that come up at once.
    registrations_per_s: Annotated[
        float,
        msgspec.Meta(
            ge=0.0,
            le=100_000.0,
            extra={"metavar": "N"},
            description="0 to 100000: registrations and withdrawals of workers each second by each API key, after a burst of "
            "four times max_workers; 0: no limit",
        ),
    ] = 100.0
    # A client's Authorization is for this router where it has a key, and goes on to the engine where it has none.
    worker_api_key: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]+$(?!\n)")] | None,
        msgspec.Meta(
            extra={"metavar": "KEY"},
            description="the engines' API key (printable ASCII, no spaces), sent to hosts that allow_hosts lists and to workers "
            "of the settings",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        msgspec.Meta(extra={"metavar": "LEVEL"}, description="debug, info, warning or error"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], msgspec.Meta(extra={"metavar": "FORMAT"}, description="text or json")
    ] = "text"
    # One line a request is much where nobody reads it.
    access_log: Annotated[
        Literal["off", "on"],
        msgspec.Meta(
            extra={"metavar": "off|on"}, description="off or on: one line in the log for each proxied request"
        ),
    ] = "off"
    # How long net changes are collected before a commit. 2 ms makes commits of 256 and more at 100 k blocks/s (0.8 M
    # transitions/s measured); over 10 ms the answers would lag visibly behind the engines.
    flush_interval_s: Annotated[
        float, msgspec.Meta(ge=0.0, le=0.010, description="seconds, 0 to 0.010: how long changes wait for a commit")
    ] = 0.002
    # 2 GiB holds some tens of millions of (worker, block) entries: a fleet of 100 engines with 256 k blocks each.
    mirror_budget_bytes: Annotated[
        int, msgspec.Meta(ge=16 * 1024**2, description="bytes, at least 16777216: memory limit of the index")
    ] = 2 * 1024**3
    # A remembered segment saves its hashing (1 ms for 8 k tokens); 256 MiB remembers tens of millions of tokens.
    segment_memory_bytes: Annotated[
        int, msgspec.Meta(ge=0, description="bytes, 0 or more: size of the cache of prompt hashes")
    ] = 256 * 1024**2
    # A prompt of 1 M tokens is 7 MB of JSON; 32 MiB leaves room and bounds what one client can make us hold.
    max_body_bytes: Annotated[
        int, msgspec.Meta(ge=1024, description="bytes, at least 1024: the largest request body")
    ] = 32 * 1024**2
    # How long a dead router's workers stay without ingest: others see it gone, and its leases free, after this and two
    # looks (a tenth of it each). 2 s left takeovers on a busy machine too near to 3 s (2.6 to 3.5 s measured). Renewed
    # every fifth, so that a router must stand still for over a second to lose a worker; then it changes hands, and
    # nothing is lost.
    lease_ttl_s: Annotated[
        float,
        msgspec.Meta(
            ge=0.5,
            le=300.0,
            description="seconds, 0.5 to 300: lease of a worker; a dead router's workers move after it",
        ),
    ] = 1.5
    # A connection that was cut is back within a second or two, a patched engine heard again within three; an engine
    # that was restarted needs longer than this to load its weights. Until then the last known residency is most likely
    # still true.
    suspect_credit_s: Annotated[
        float,
        msgspec.Meta(
            ge=0.0,
            le=3600.0,
            description="seconds, 0 to 3600: how long a suspect worker keeps its credit",
        ),
    ] = 10.0
    # An hour of three requests a second: who asks why a request went where it went does so soon.
    decisions_kept: Annotated[
        int,
        msgspec.Meta(ge=0, le=1_000_000, description="0 to 1000000: decisions that GET /decisions explains later"),
    ] = 10_000
    # A busy engine's cache turns over in some minutes; what other routers of this kind take.
    approximate_ttl_s: Annotated[
        float,
        msgspec.Meta(
            ge=0.0,
            le=86_400.0,
            description="seconds, 0 to 86400: how long a prompt counts as cached at a worker without usable events",
        ),
    ] = 120.0
    # A fleet notices a dead replica within a second; an engine answers /health in under a millisecond.
    health_interval_s: Annotated[
        float,
        msgspec.Meta(
            ge=0.0, le=3600.0, description="seconds, 0 to 3600: interval of engine health checks; 0 turns them off"
        ),
    ] = 1.0
    # The time that OpenAI's own client waits. The first byte of an answer that is not streamed comes with its last
    # token; an engine that hangs is noticed by its health checks in seconds.
    answer_timeout_s: Annotated[
        float,
        msgspec.Meta(
            gt=0.0,
            le=86_400.0,
            description="seconds, over 0 to 86400: how long an engine may send nothing, before or within an answer",
        ),
    ] = 600.0
    # Kubernetes sends SIGKILL after 30 s by default: a little less, so that what is cut is cut in order.
    drain_s: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=86_400,
            description="whole seconds, 0 to 86400: how long running requests may take to finish after SIGTERM",
        ),
    ] = 25
    # Off: who stops it at a terminal does not wait. Behind a load balancer, as long as that takes to notice:
    # Kubernetes' endpoints some seconds.
    shutdown_delay_s: Annotated[
        float,
        msgspec.Meta(
            ge=0.0,
            le=3600.0,
            description="seconds, 0 to 3600: how long new connections are accepted after SIGTERM, while /ready answers 503",
        ),
    ] = 0.0
    # vLLM answers a full ring (10,000 batches) in well under a second; a lost answer must not hold a worker for long.
    replay_timeout_s: Annotated[
        float, msgspec.Meta(gt=0.0, le=60.0, description="seconds, over 0 to 60: how long to wait for a replay")
    ] = 5.0
    # The one that is meant to be used; the others are there to compare with.
    policy: Annotated[
        Literal["kv", "round_robin", "least_load", "random", "prefix_only", "full_attention_only"],
        msgspec.Meta(
            extra={"metavar": "NAME"},
            description="kv (least cost), or for comparison: round_robin, least_load, random, prefix_only, full_attention_only",
        ),
    ] = "kv"
    # Chance costs reuse; it spreads load where the costs are known to be wrong.
    temperature: Annotated[
        float,
        msgspec.Meta(
            ge=0.0,
            le=10.0,
            extra={"metavar": "T"},
            description="0 to 10: sampling temperature of policy kv; 0 randomises ties only",
        ),
    ] = 0.0
    # Some seconds of an engine's work: enough that it never runs dry, and a new prompt is not better off in its queue
    # than in ours, from where it can still go to whoever is free first.
    saturation_tokens: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=2**40, description="tokens, at least 1: queued prefill above which a worker gets no more prompts"
        ),
    ] = 131_072
    # Below it a hand-over takes longer than the computing (`disaggregation.HANDOVER_TOKENS`), however idle the prefill
    # worker is; it pays only where prompts queue at the decode worker, and short ones are not what such a queue
    # consists of.
    remote_prefill_min_tokens: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=2**40,
            description="tokens, 0 or more: prompts with fewer uncached tokens are prefilled by their decode worker",
        ),
    ] = 1_024
    # An 8 B model's 128 KiB a token over 200 Gb/s (RDMA, 25 GB/s) are 190,000 tokens/s, where an H100 computes some
    # 30,000 to 40,000. Over 25 Gb/s Ethernet it is more than 1.
    handover_token_cost: Annotated[
        float,
        msgspec.Meta(
            ge=0.0,
            le=100.0,
            extra={"metavar": "COST"},
            description="0 to 100: cost of transferring a token to the decode worker, in computed tokens",
        ),
    ] = 0.2
    # Engines' patches that list the clients they admit know a router by it.
    curve_client_key: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            extra={"metavar": "FILE"},
            description="the file with this router's secret CURVE key, for patches that list their clients; without it, "
            "another for each connection",
        ),
    ] = None
    # Each holds its connection and its body.
    queue_size: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=100_000, description="0 to 100000: prompts that may wait while all workers are saturated"
        ),
    ] = 1_024
    # Clients and load balancers give up after a minute.
    queue_deadline_s: Annotated[
        float, msgspec.Meta(ge=0.0, le=3600.0, description="seconds, 0 to 3600: how long a prompt waits for a worker")
    ] = 30.0
    # Each has sockets, a task and tables of its own; fleets have tens to hundreds. Without a limit a client that
    # registers in a loop would take all of the process's descriptors.
    max_workers: Annotated[
        int, msgspec.Meta(ge=1, le=6_000, description="1 to 6000: how many workers (ranks) this router follows")
    ] = 1_024
    # Without one, engines tokenize: exact for every engine, at the cost of a round trip and some of its work.
    tokenizers: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            extra={"metavar": "MODEL=FOLDER", "flag": "--tokenizer"},
            description="a list of MODEL=FOLDER with its tokenizer.json; without one, the model's engines tokenize",
        ),
    ] = ()
    # A request waits for its tokens at most this long, as it then can only be placed by load. An engine renders a chat
    # in some milliseconds, and some tens of thousands of tokens in some tens; beyond a second it is overloaded itself.
    tokenize_timeout_s: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=60.0, description="seconds, over 0 to 60: time limit for tokenizing a prompt"),
    ] = 1.0
    model_aliases: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            extra={"metavar": "NAME=MODEL", "flag": "--model-alias"},
            description="a list of NAME=MODEL: other names for models and LoRA adapters",
        ),
    ] = ()
    # Off: a trace costs a request some 150 us of CPU, and needs a collector. The SDK's own variables (OTEL_*) say how;
    # this one, that and where.
    otlp_endpoint: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^https?://[\x21-\x7e]+$(?!\n)")] | None,
        msgspec.Meta(
            extra={"metavar": "URL"},
            description="a collector's URL like http://otel:4318 (OTLP over HTTP); without it, no traces",
        ),
    ] = None
    # None: the engines run without PYTHONHASHSEED, as they do by default.
    none_hash_seed: Annotated[
        str | None,
        msgspec.Meta(extra={"metavar": "SEED"}, description="the engines' PYTHONHASHSEED; omit it if they have none"),
    ] = None

    def shown(self) -> dict[str, Any]:
        """The settings for a log: no secret, no password in the Redis URL."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for name in SECRETS:
            if shown[name] is not None:
                shown[name] = HIDDEN
        for name in ("redis", "otlp_endpoint"):
            if shown[name] is not None:
                shown[name] = without_password(shown[name])
        return shown


FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}


# Settings that are lists, one value a flag. In the environment white space separates the values: none of theirs
# has any.
LISTS = frozenset(name for name, field in FIELDS.items() if field.default == ())


def describe(name: str) -> str:
    """What setting `name` is: the text of its help and of its errors."""
    return str((_metadata(name).extra_json_schema or {}).get("description", ""))


def flag_of(name: str) -> str:
    """The flag that gives a value of setting `name`."""
    return str(_extra(name).get("flag") or f"--{name.replace('_', '-')}")


def metavar_of(name: str) -> str:
    """What stands for a value of setting `name` in the help."""
    return str(_extra(name).get("metavar") or ("S" if name.endswith("_s") else "N"))


def _extra(name: str) -> dict[str, Any]:
    return _metadata(name).extra or {}


def _metadata(name: str) -> msgspec.inspect.Metadata:
    info = msgspec.inspect.type_info(FIELDS[name].type)
    assert isinstance(info, msgspec.inspect.Metadata), f"setting {name} has no description"
    return info


def variable_of(name: str) -> str:
    """The environment variable of setting `name`."""
    return ENV_PREFIX + name.upper()


def without_password(url: str) -> str:
    """The URL with its user part hidden, `redis://***@host`, and what follows `sentinel_password=`. Up to the last
    `@` and to the end: a password may hold any of `/@?#&` unescaped."""
    hidden = re.sub(r"(sentinel_password=).*", rf"\1{HIDDEN}", url, flags=re.DOTALL)
    return re.sub(r"(//).*@", rf"\1{HIDDEN}@", hidden, flags=re.DOTALL)
