# SPDX-License-Identifier: Apache-2.0
"""A worker as one line of text, and the checks on what a worker may be called and where it may listen.

`ID=HTTP_URL[,events=tcp://H:P][,replay=tcp://H:P][,model=NAME][,dp_rank=N][,KEY=VALUE...]`. The checks serve
`POST /register` too. They return the problem as text that names what to write instead, or None; pure, no I/O.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_name import engine_problem
from kvrouter.router.model.workers.registration import MAX_TOKENS, NO_PATCH, CatalogSpec, Registration
from kvrouter.router.model.workers.role import HandoverWay, Role, handover_problem, role_problem

# Names become Redis keys, labels and log fields; longer ones are a mistake or an attack.
MAX_NAME_CHARS = 512

# Data-parallel ranks are counted from 0; vLLM's largest deployments have some hundreds.
MAX_DP_RANK = 65_535

HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "sglang", "sglang_bigram")

SHAPE = "ID=HTTP_URL[,events=tcp://H:P][,replay=tcp://H:P][,model=NAME][,dp_rank=N][,KEY=VALUE...]"
CATALOG_NUMBERS = ("hash_block_size", "scheduler_block_size", "hash_lookahead_tokens", "offload_blocks_per_chunk")
CATALOG_TEXTS = ("hash_algo", "none_hash", "none_hash_seed", "offload_connector")
KEYS = (
    "events",
    "replay",
    "patch",
    "patch_key",
    "model",
    "dp_rank",
    "block_size",
    "lora_name",
    "role",
    "handover",
    "engine",
    *CATALOG_NUMBERS,
    *CATALOG_TEXTS,
)


class WorkerSpec(msgspec.Struct, frozen=True):
    """One `--worker`. `model` None: the engine at `url` is queried for its name; `dp_rank` None: all ranks that it
    has."""

    worker_id: str
    url: str
    dp_rank: int | None = None
    model: str | None = None
    events: str | None = None
    replay: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    catalog: CatalogSpec | None = None
    patch: str | None = None
    patch_key: str | None = None
    role: Role = Role.BOTH
    handover: HandoverWay = HandoverWay.KV_TRANSFER_PARAMS
    engine: str | None = None

    def registration(self, model: str) -> Registration:
        """The registration that this line stands for, as a worker of `model`."""
        return Registration(
            worker=WorkerKey(model, self.worker_id, self.dp_rank or 0),
            events=self.events,
            replay=self.replay,
            url=self.url,
            block_size=self.block_size,
            lora_name=self.lora_name,
            catalog=self.catalog,
            patch=self.patch,
            patch_key=self.patch_key,
            role=self.role,
            handover=self.handover,
            engine=self.engine,
        )


def name_problem(name: str) -> str | None:
    """Why `name` cannot name a worker or a model."""
    if not name or not name.strip():
        return "must not be empty"
    if len(name) > MAX_NAME_CHARS:
        return f"must have at most {MAX_NAME_CHARS} characters"
    # A lone surrogate (JSON's "\ud800") has no UTF-8, so it can be neither stored nor sent on.
    if any("\ud800" <= c <= "\udfff" for c in name):
        return "must be valid Unicode"
    return None


def worker_id_problem(worker_id: str) -> str | None:
    """Why `worker_id` cannot name a worker."""
    problem = name_problem(worker_id)
    if problem is None and (found := re.search(r"@([0-9]+)\Z", worker_id)):
        # Pins, headers, metrics and logs name rank 1 of `w0` so (names.route_name).
        problem = f"must not end in {found[0]!r}, which stands for a rank: write dp_rank={found[1]}, or another name"
    return problem


def endpoint_problem(endpoint: str) -> str | None:
    """Why `endpoint` is no ZMQ endpoint to connect to."""
    wanted = "must be a ZMQ endpoint like tcp://10.0.0.5:5557 or ipc:///run/kv.sock"
    if any(c.isspace() or not c.isprintable() for c in endpoint) or len(endpoint) > MAX_NAME_CHARS:
        return wanted
    if endpoint.startswith("ipc://"):
        return None if len(endpoint) > len("ipc://") else wanted
    # Not `;`, which libzmq takes for the end of a source address, nor a bare IPv6 address: what we read as the host
    # must be what libzmq connects to.
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\[\]:;/@\\]+):(\d{1,5})", endpoint)
    if not found or not 0 < int(found[2]) <= 65_535:
        return wanted
    if found[1] in ("*", "0.0.0.0", "[::]"):
        return f"{wanted}; {found[1]} is where the engine binds, not where it can be reached"
    return None


def patch_problem(patch: str) -> str | None:
    """Why `patch` is neither NO_PATCH nor where an engine patch answers."""
    problem = None if patch == NO_PATCH else endpoint_problem(patch)
    return problem and f"{problem}; or {NO_PATCH}, not to look for an engine patch"


def patch_key_problem(key: str, patch: str | None) -> str | None:
    """Why `key` is no public key of CURVE for the patch at `patch`."""
    if patch == NO_PATCH:
        return f"needs the engine patch; do not set patch to {NO_PATCH}"
    # 32 bytes in Z85. Source: ZMQ RFC 32.
    found = re.fullmatch(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", key)
    return None if found else "must be the engine's public key of CURVE: 40 characters in Z85"


def url_problem(url: str) -> str | None:
    """Why `url` is no HTTP address of an engine."""
    wanted = "must be an HTTP address like http://10.0.0.5:8000, without user and password, query and fragment"
    if any(c.isspace() or not c.isprintable() for c in url) or len(url) > MAX_NAME_CHARS:
        return wanted
    try:
        parts = urlsplit(url)
        # The address is shown in /workers and given to clients, so it must not contain a password; and readers of URLs
        # disagree about `@` and backslashes. A query would swallow the paths that the router requests.
        plain = bool(parts.hostname) and "@" not in parts.netloc and not any(c in url for c in "\\?#")
        good = parts.scheme in ("http", "https") and plain and (parts.port is None or parts.port > 0)
    except ValueError:
        return wanted
    return None if good else wanted


def none_hash_problem(text: str) -> str | None:
    """Why `text` is no root hash; vLLM's has 32 bytes (sha256) or 16 (xxhash)."""
    return None if re.fullmatch(r"(0x)?([0-9a-fA-F]{2}){8,32}", text) else "must be 16 to 64 hex digits"


def connector_problem(name: str) -> str | None:
    """Why `name` names no KV connector; one without a hit rule is accepted, and earns nothing."""
    wanted = "must be the class name of a KV connector of vLLM, like OffloadingConnector or SimpleCPUOffloadConnector"
    return None if re.fullmatch(r"[A-Za-z_][\w.]{0,127}", name, re.ASCII) else wanted


def parse_worker(spec: str) -> WorkerSpec:
    """The worker that `spec` describes. Raises SettingError."""
    head, *pairs = spec.split(",")
    worker_id, separator, url = head.partition("=")
    if not separator or not url:
        raise SettingError(f"write {SHAPE}")
    _check("ID", worker_id_problem(worker_id))
    _check("HTTP_URL", url_problem(url))
    values: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not value:
            raise SettingError(f"{pair!r} is not KEY=VALUE; write {SHAPE}")
        if key not in KEYS:
            raise SettingError(f"there is no key {key!r}; the keys are {', '.join(KEYS)}")
        if key in values:
            raise SettingError(f"{key} is given twice; give it once")
        values[key] = value
    for key in ("events", "replay"):
        if key in values:
            _check(key, endpoint_problem(values[key]))
    if "patch" in values:
        _check("patch", patch_problem(values["patch"]))
    if "patch_key" in values:
        _check("patch_key", patch_key_problem(values["patch_key"], values.get("patch")))
    if "role" in values:
        _check("role", role_problem(values["role"]))
    if "handover" in values:
        _check("handover", handover_problem(values["handover"]))
    if "engine" in values:
        _check("engine", engine_problem(values["engine"]))
    if "model" in values:
        _check("model", name_problem(values["model"]))
    if "none_hash" in values:
        _check("none_hash", none_hash_problem(values["none_hash"]))
    if "offload_connector" in values:
        _check("offload_connector", connector_problem(values["offload_connector"]))
    if values.get("hash_algo", HASH_ALGOS[0]) not in HASH_ALGOS:
        raise SettingError(f"hash_algo must be one of {', '.join(HASH_ALGOS)}")
    catalog: dict[str, str | int] = {key: values[key] for key in CATALOG_TEXTS if key in values}
    catalog |= {key: _number(values, key) for key in CATALOG_NUMBERS if key in values}
    return WorkerSpec(
        worker_id=worker_id,
        url=url,
        dp_rank=_number(values, "dp_rank", least=0, most=MAX_DP_RANK) if "dp_rank" in values else None,
        model=values.get("model"),
        events=values.get("events"),
        replay=values.get("replay"),
        block_size=_number(values, "block_size") if "block_size" in values else None,
        lora_name=values.get("lora_name"),
        catalog=msgspec.convert(catalog, CatalogSpec) if catalog else None,
        patch=values.get("patch"),
        patch_key=values.get("patch_key"),
        role=Role(values.get("role", Role.BOTH)),
        handover=HandoverWay(values.get("handover", HandoverWay.KV_TRANSFER_PARAMS)),
        engine=values.get("engine"),
    )


def _number(values: dict[str, str], key: str, least: int = 1, most: int = MAX_TOKENS) -> int:
    text = values[key]
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise SettingError(f"{key} must be a whole number, {least} to {most}")
    return int(text)


def _check(what: str, problem: str | None) -> None:
    if problem:
        raise SettingError(f"{what} {problem}")
