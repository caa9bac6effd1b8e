# SPDX-License-Identifier: Apache-2.0
"""A worker as one line of text, and the checks of the names and addresses of workers. Pure.

The line is `[ID=]HTTP_URL[,events=tcp://H:P][,replay=tcp://H:P][,model=NAME][,dp_rank=N][,KEY=VALUE...]`. The checks serve
`POST /register` too. Each of them returns None if a text is valid, and otherwise the problem, as the end of a sentence
that begins with the name of the field and says what to write instead.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvrouter.contract.registrations import RegisterBody
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.model.workers.hash_algorithms import ALGORITHMS, DEFAULT_ALGO
from kvrouter.router.model.workers.registration import NO_PATCH

# Names become Redis keys, labels and log fields. A longer name is a mistake or an attack.
MAX_NAME_CHARS = 512

# Data-parallel ranks count from 0; vLLM's largest deployments have a few hundred.
MAX_DP_RANK = 65_535
MAX_PORT = 65_535

SHAPE = "[ID=]HTTP_URL[,events=tcp://H:P][,replay=tcp://H:P][,model=NAME][,dp_rank=N][,KEY=VALUE...]"
HTTP = ("http://", "https://")

# The keys of a SPEC whose fields in `POST /register` have other names.
REGISTER_NAMES = {"events": "endpoint", "replay": "replay_endpoint", "patch": "patch_endpoint"}
SPEC_NAMES = {"worker_id": "ID", "url": "HTTP_URL", **{field: key for key, field in REGISTER_NAMES.items()}}
CATALOG_NUMBERS = ("hash_block_size", "scheduler_block_size", "hash_lookahead_tokens", "offload_blocks_per_chunk")
CATALOG_KEYS = (*CATALOG_NUMBERS, "hash_algo", "none_hash", "none_hash_seed", "offload_connector")
NUMBERS = ("dp_rank", "block_size", *CATALOG_NUMBERS)
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
    "engine_key",
    "peer",
    *CATALOG_KEYS,
)


def name_problem(name: str) -> str | None:
    """Return why `name` cannot name a worker or a model, or None if it can."""
    if not name or not name.strip():
        return "must not be empty"
    if len(name) > MAX_NAME_CHARS:
        return f"must have at most {MAX_NAME_CHARS} characters"
    # A lone surrogate (JSON's "\ud800") has no UTF-8 form, so it can be neither stored nor sent on.
    if any("\ud800" <= c <= "\udfff" for c in name):
        return "must be valid Unicode"
    return None


def worker_id_problem(worker_id: str) -> str | None:
    """Return why `worker_id` cannot name a worker, or None if it can."""
    problem = name_problem(worker_id)
    if problem is None and (match := re.search(r"@([0-9]+)\Z", worker_id)):
        # Pins, headers, metrics and logs name rank 1 of `w0` in this form (`ids.route_name`).
        problem = f"must not end in {match[0]!r}, which stands for a rank: write dp_rank={match[1]}, or another name"
    return problem


def endpoint_problem(endpoint: str) -> str | None:
    """Return why `endpoint` is no ZMQ endpoint to connect to, or None if it is one."""
    wanted = "must be a ZMQ endpoint like tcp://10.0.0.5:5557 or ipc:///run/kv.sock"
    if any(c.isspace() or not c.isprintable() for c in endpoint) or len(endpoint) > MAX_NAME_CHARS:
        return wanted
    if endpoint.startswith("ipc://"):
        return None if len(endpoint) > len("ipc://") else wanted
    # The host that the router reads must be the host that libzmq connects to. So the pattern matches neither `;`, which
    # libzmq takes for the end of a source address, nor a bare IPv6 address.
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\[\]:;/@\\]+):(\d{1,5})", endpoint)
    if not match or not 0 < int(match[2]) <= MAX_PORT:
        return wanted
    if match[1] in ("*", "0.0.0.0", "[::]"):
        return f"{wanted}; {match[1]} is where the engine binds, not where it can be reached"
    return None


def peer_problem(peer: str, dp_rank: int) -> str | None:
    """Return why `peer` is no address of vLLM's p2p tier for this rank, or None if it is one.

    The tier takes no IPv6 address. Source: vLLM 0.33.0, module `vllm.v1.kv_offload.tiering.p2p.control.zmq`.
    """
    wanted = "must be HOST:PORT like 10.0.0.5:5710, with a name or an IPv4 address"
    match = re.fullmatch(r"([^\[\]:;/@\\,]+):(\d{1,5})", peer)
    if match is None or endpoint_problem(f"tcp://{peer}") is not None:
        return wanted
    last_port = int(match[2]) + dp_rank
    return (
        None if last_port <= MAX_PORT else f"{wanted}, whose port plus dp_rank is at most {MAX_PORT}, not {last_port}"
    )


def peer_address(peer: str, dp_rank: int) -> tuple[str, int]:
    """Return host and port of a rank of vLLM's p2p tier, which counts its ports from that of rank 0."""
    host, _, port = peer.rpartition(":")
    return host, int(port) + dp_rank


def patch_problem(patch: str) -> str | None:
    """Return why `patch` is neither NO_PATCH nor the endpoint of an engine patch, or None if it is one of them."""
    problem = None if patch == NO_PATCH else endpoint_problem(patch)
    return problem and f"{problem}; or {NO_PATCH}, not to look for an engine patch"


def patch_key_problem(key: str, patch: str | None) -> str | None:
    """Return why `key` is no public key of CURVE for the patch at `patch`, or None if it is one."""
    if patch == NO_PATCH:
        return f"needs the engine patch; do not set patch to {NO_PATCH}"
    # The key has 32 bytes, in Z85. Source: ZMQ RFC 32.
    match = re.fullmatch(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", key)
    return None if match else "must be the engine's public key of CURVE: 40 characters in Z85"


def key_name_problem(name: str) -> str | None:
    """Return why `name` cannot name a key of engines, or None if it can."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        return None
    return "must be the name of a key in worker_api_keys_file: up to 64 letters, digits and ._-"


def url_problem(url: str) -> str | None:
    """Return why `url` is no HTTP address of an engine, or None if it is one."""
    wanted = "must be an HTTP address like http://10.0.0.5:8000, without user and password, query and fragment"
    if any(c.isspace() or not c.isprintable() for c in url) or len(url) > MAX_NAME_CHARS:
        return wanted
    try:
        parts = urlsplit(url)
        # /workers and answers show the address to clients, so it must not contain a password. Besides, readers of URLs
        # disagree about `@` and backslashes, and a query would swallow the paths that the router requests.
        plain = bool(parts.hostname) and "@" not in parts.netloc and not any(c in url for c in "\\?#")
        good = parts.scheme in ("http", "https") and plain and (parts.port is None or parts.port > 0)
    except ValueError:
        return wanted
    return None if good else wanted


def none_hash_problem(text: str, algo: str | None) -> str | None:
    """Return why `text` is no root hash in hex of the algorithm `algo` (None: the default), or None if it is one."""
    # The names of SGLang's algorithms stand for no length, because its hashes have no root.
    name = algo if algo is not None and algo in ALGORITHMS else DEFAULT_ALGO
    digits = 2 * ALGORITHMS[name].digest_bytes
    return (
        None
        if re.fullmatch(rf"(0x)?[0-9a-fA-F]{{{digits}}}", text)
        else f"must be {digits} hex digits, as hash_algo is {name}"
    )


def plain_none_hash(text: str) -> str:
    """Return a root hash in the form in which registrations have it: hex digits in lower case, without 0x."""
    return text.removeprefix("0x").lower()


def length_problem(text: str, most: int = MAX_NAME_CHARS) -> str | None:
    """Return why `text` is too long, or None if it is not."""
    return f"has a text of {len(text)} characters; at most {most} are possible" if len(text) > most else None


def connector_problem(name: str) -> str | None:
    """Return why `name` cannot name a KV connector, or None if it can.

    A connector without a hit rule is accepted, but its tiers earn no credit.
    """
    wanted = "must be the class name of a KV connector of vLLM, like OffloadingConnector or SimpleCPUOffloadConnector"
    return None if re.fullmatch(r"[A-Za-z_][\w.]{0,127}", name, re.ASCII) else wanted


def body_of(spec: str) -> RegisterBody:
    """Return the body of `POST /register` that the line `spec` stands for. Raises SettingError.

    The values are not checked; `registration_of` does that.
    """
    head, *pairs = spec.split(",")
    worker_id, separator, url = head.partition("=")
    if head.lower().startswith(HTTP) and not url.lower().startswith(HTTP):
        worker_id, url = id_from_url(head), head
    elif not separator or not url:
        raise SettingError(f"write {SHAPE}")
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not value:
            raise SettingError(f"{pair!r} is not KEY=VALUE; write {SHAPE}")
        if key not in KEYS:
            raise SettingError(f"there is no key {key!r}; the keys are {', '.join(KEYS)}")
        if key in values:
            raise SettingError(f"{key} is given twice; give it once")
        values[key] = _number(key, value) if key in NUMBERS else value
    if "replay" in values and "events" not in values:
        raise SettingError("replay needs events: the router cannot replay the events of a stream that it does not read")
    fields = {REGISTER_NAMES.get(key, key): value for key, value in values.items() if key not in CATALOG_KEYS}
    if catalog := {key: value for key, value in values.items() if key in CATALOG_KEYS}:
        fields["catalog"] = catalog
    return msgspec.convert({"worker_id": worker_id, "url": url, **fields}, RegisterBody)


def id_from_url(url: str) -> str:
    """Return the id of a worker that is given by its address alone: host and port, like `10.0.0.5:8000`."""
    try:
        host_and_port = urlsplit(url).netloc
    except ValueError:
        host_and_port = ""
    # An address without a host is returned unchanged: the later check of the address reports what is wrong with it.
    return host_and_port or url


def in_words_of_spec(message: str) -> str:
    """Return an error message about a field of `POST /register` with the field's name replaced by that in a SPEC."""
    field, separator, rest = message.partition(" ")
    return f"{SPEC_NAMES.get(field, field.removeprefix('catalog.'))}{separator}{rest}"


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        raise SettingError(f"{key} must be a whole number")
    return int(text)
