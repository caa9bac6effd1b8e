# SPDX-License-Identifier: Apache-2.0
"""The settings of the patch: `KVROUTER_PATCH*` variables for users, `ReporterSettings` for code.

A wrong value is never fatal, because the engine must start: the default is used instead, and a log message says how to
correct the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

SWITCH = "KVROUTER_PATCH"
PREFIX = "KVROUTER_PATCH_"

# The ledger takes 12 to 25 bytes a block (benchmarks/patch_ledger.py), so 100 MB at worst; vLLM itself spends several
# times that on as many blocks.
DEFAULT_MAX_BLOCKS = 4_000_000

DEFAULT_HEARTBEAT_S = 1.0
# More frequent heartbeats would cost more than the events; rarer ones would leave a dead engine unnoticed for minutes.
MIN_HEARTBEAT_S = 0.05
MAX_HEARTBEAT_S = 60.0

# Kubernetes sets KVROUTER_PATCH_SERVICE_HOST and similar variables for a Service named kvrouter-patch.
_KUBERNETES = re.compile(r"KVROUTER_PATCH_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\w+)?)$")
_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/*]+):(\d{1,5})|(ipc|inproc)://\S+")
_MAX_PORT = 65_535

_ON = frozenset(("1", "true", "yes", "on"))
_OFF = frozenset(("0", "false", "no", "off"))


class ReporterSettings(msgspec.Struct, frozen=True):
    """The limits and intervals of the reporter."""

    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    # Messages that may wait for the reporter's thread. As many as vLLM's own publisher queues.
    max_queue_size: int = 100_000
    # Bytes of the changes of dropped messages that wait for the ledger. They hold some 8 million hashes, which are
    # minutes of a fast engine.
    max_dropped_bytes: int = 64 << 20
    # Distinct blocks, over all places, that the ledger may count.
    max_ledger_blocks: int = DEFAULT_MAX_BLOCKS
    # Messages that PUB keeps for a reader that lags: some seconds of engine steps, some MB. vLLM keeps 100,000, but a
    # reader that lags further here loads a snapshot, which is less to send than such an old backlog.
    report_hwm: int = 1_000
    # Snapshots that may be served at once. A frozen million blocks takes 12 MB, shared by all clients of the same
    # moment.
    max_snapshots: int = 4
    # Seconds without a part taken by the client until its snapshot is abandoned.
    snapshot_timeout_s: float = 10.0
    # Seconds after which a refused client should repeat its request.
    retry_s: float = 1.0
    # Parts and replies that may wait in ZMQ for one client: 1 MiB of snapshot, which keeps a fast client busy between
    # two turns.
    reply_hwm: int = 16


class PatchSettings(msgspec.Struct, frozen=True):
    """The settings that a user can make in the engine's environment."""

    enabled: bool = True
    # The addresses to listen on; None: next to the engine's own event endpoint.
    requests: str | None = None
    reports: str | None = None
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    max_blocks: int = DEFAULT_MAX_BLOCKS
    # The file with the secret key of both sockets; None: they do not encrypt.
    curve_key: str | None = None
    # The file that lists the public keys of the clients that both sockets admit; None: any client that knows the
    # engine's public key.
    curve_clients: str | None = None

    def reporter(self) -> ReporterSettings:
        """Return the reporter's settings that follow from these."""
        return ReporterSettings(heartbeat_s=self.heartbeat_s, max_ledger_blocks=self.max_blocks)


def from_environment(environment: Mapping[str, str]) -> tuple[PatchSettings, list[str]]:
    """Return the settings, and one text for each wrong variable, which is replaced by its default.

    An empty value counts as unset.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for variable, (field, read, expected) in _VARIABLES.items():
        raw = environment.get(variable, "").strip()
        if not raw:
            continue
        value = read(raw)
        if value is None:
            default = getattr(PatchSettings(), field)
            fallback = "a place beside the engine's event endpoint" if default is None else _shown(default)
            problems.append(f"{variable}={raw!r} is not {expected}; {fallback} is used until it is")
        else:
            values[field] = value
    problems += [
        f"{variable} is not a setting of the engine patch; there are {', '.join(_VARIABLES)}"
        for variable in sorted(environment)
        if variable.startswith(PREFIX) and variable not in _VARIABLES and not _KUBERNETES.match(variable)
    ]
    return PatchSettings(**values), problems


def _shown(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _switch(text: str) -> bool | None:
    lower = text.lower()
    return lower in _ON if lower in _ON | _OFF else None


def _endpoint(text: str) -> str | None:
    match = _ENDPOINT.fullmatch(text)
    return text if match and int(match[2] or 0) <= _MAX_PORT else None


def _heartbeat_s(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and MIN_HEARTBEAT_S <= value <= MAX_HEARTBEAT_S else None


def _max_blocks(text: str) -> int | None:
    # `int` alone is too lenient: it also reads "1_000" and the digits of other scripts, which are more likely a slip.
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,11}", text) else None


_AN_ENDPOINT = "an address to listen on, like tcp://*:15557 or ipc:///run/engine-requests"

# Variable -> (field, function that reads the value or returns None for a wrong one, what to write instead).
_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    SWITCH: ("enabled", _switch, "1 (on) or 0 (off)"),
    "KVROUTER_PATCH_REQUESTS": ("requests", _endpoint, _AN_ENDPOINT),
    "KVROUTER_PATCH_REPORTS": (
        "reports",
        _endpoint,
        _AN_ENDPOINT.replace("15557", "16557").replace("requests", "reports"),
    ),
    # Any text is accepted here: a file without a key must end in no reports, never in unencrypted ones.
    "KVROUTER_PATCH_CURVE_KEY": ("curve_key", lambda text: text, "the path of a file"),
    "KVROUTER_PATCH_CURVE_CLIENTS": ("curve_clients", lambda text: text, "the path of a file"),
    "KVROUTER_PATCH_HEARTBEAT_S": (
        "heartbeat_s",
        _heartbeat_s,
        f"a number of seconds from {MIN_HEARTBEAT_S} to {MAX_HEARTBEAT_S:.0f}",
    ),
    "KVROUTER_PATCH_MAX_BLOCKS": ("max_blocks", _max_blocks, "a whole number of blocks, 1 or more, like 4000000"),
}
