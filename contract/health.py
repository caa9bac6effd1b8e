# SPDX-License-Identifier: Apache-2.0
"""The answers of `/health`, `/ready` and `/version`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class HealthReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The health of the process."""

    status: Annotated[str, Meta(description="ok, or degraded")]
    reasons: Annotated[list[str], Meta(description="why the process is degraded, each a sentence")]
    warnings: Annotated[
        list[str] | None,
        Meta(description="risks that degrade nothing yet (docs/how-to/monitoring.md); absent if there are none"),
    ] = None


class ReadyReply(msgspec.Struct, frozen=True):
    """The readiness of the process. The last two fields are for Dynamo's clients."""

    status: Annotated[str, Meta(description="always ready")]
    ready: Annotated[bool, Meta(description="always true")]
    schedulable_workers: Annotated[int, Meta(description="worker ids that would get a request")]


class VersionReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name and the version of the router, and the addresses that its page links to."""

    name: Annotated[str, Meta(description="name of the package")]
    version: Annotated[str, Meta(description="the version")]
    documentation_url: Annotated[str | None, Meta(description="the setting of this name; absent without it")] = None
    grafana_url: Annotated[str | None, Meta(description="the setting of this name; absent without it")] = None
    trace_url: Annotated[
        str | None,
        Meta(
            description="the setting of this name: the address of a request's trace, with {trace_id} or {request_id} in place "
            "of its id; absent without it"
        ),
    ] = None
