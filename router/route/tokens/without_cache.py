# SPDX-License-Identifier: Apache-2.0
"""Which kinds of engines reuse nothing for a request, as it wants what needs the whole prompt computed. Pure."""

from __future__ import annotations

import msgspec

from kvrouter.router.model.engines.engine import CACHE_FIELDS
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.route.tokens.client_body import ClientBody

NONE: frozenset[str] = frozenset()


def engines_without_cache(body: ClientBody) -> frozenset[str]:
    """Names of engines. A value that is no JSON is for the engine to refuse."""
    given = CACHE_FIELDS & body.fields.keys()
    if not given:
        return NONE
    try:
        fields = {name: msgspec.json.decode(body.fields[name]) for name in given}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return NONE
    return frozenset(engine.name for engine in ENGINES.values() if engine.skips_cache(fields))
