# SPDX-License-Identifier: Apache-2.0
"""The sources of registrations, and which source wins if two name the same worker. Pure.

An operator's settings for this router win over sources that change by themselves, and these win over clients. So a
client with the API key cannot take over the name of a worker that the operator's list or the cluster names.
"""

from __future__ import annotations

# `--worker` and KVROUTER_WORKERS.
STATIC = "static"
# `workers:` in the settings file.
CONFIG = "config"
# The file of the setting `workers_file`.
FILE = "file"
# Pods.
KUBERNETES = "kubernetes"
# Clients.
REGISTER = "register"

# The first source wins.
PRECEDENCE = (STATIC, CONFIG, FILE, KUBERNETES, REGISTER)

# By source, the place where a worker can be removed again.
PLACES = {
    STATIC: "--worker or KVROUTER_WORKERS",
    CONFIG: "`workers` of the settings file",
    FILE: "the file of the setting workers_file",
    KUBERNETES: "Kubernetes: its pod, or the label that selects it",
    REGISTER: "POST /unregister",
}


def wins(source: str, other: str) -> bool:
    """Return whether `source` may replace a registration of source `other`; a source of another version comes last."""
    return _place(source) < _place(other)


def _place(source: str) -> int:
    return PRECEDENCE.index(source) if source in PRECEDENCE else len(PRECEDENCE)
