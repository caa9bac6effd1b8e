# SPDX-License-Identifier: Apache-2.0
"""Who says that a worker is there, and whose word counts where two say it of one worker. Pure.

What an operator wrote for this very router wins over what changes by itself, and that over what any client may say: a
client with the key must not take over the name of a worker that the operator's list or the cluster knows.
"""

from __future__ import annotations

# `--worker` and KVROUTER_WORKERS; `workers:` in the settings file; the file of the setting `workers_file`; pods;
# clients.
STATIC = "static"
CONFIG = "config"
FILE = "file"
KUBERNETES = "kubernetes"
REGISTER = "register"

# The first wins.
PRECEDENCE = (STATIC, CONFIG, FILE, KUBERNETES, REGISTER)

# Where a worker of each is taken out again.
PLACES = {
    STATIC: "--worker or KVROUTER_WORKERS",
    CONFIG: "`workers` of the settings file",
    FILE: "the file of the setting workers_file",
    KUBERNETES: "Kubernetes: its pod, or the label that selects it",
    REGISTER: "POST /unregister",
}


def wins(source: str, other: str) -> bool:
    """Whether `source` may replace what `other` says. One that is not known (of another version) counts last."""
    return _place(source) < _place(other)


def _place(source: str) -> int:
    return PRECEDENCE.index(source) if source in PRECEDENCE else len(PRECEDENCE)
