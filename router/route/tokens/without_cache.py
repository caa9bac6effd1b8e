# SPDX-License-Identifier: Apache-2.0
"""The kinds of engines that reuse nothing for a request, because it needs the whole prompt computed. Pure."""

from __future__ import annotations

import msgspec

from kvrouter.router.model.engines.engine import CACHE_FIELDS
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.route.tokens.client_body import ClientBody

NONE: frozenset[str] = frozenset()


def engines_without_cache(body: ClientBody) -> frozenset[str]:
    """Return the names of the engines that reuse nothing for this request.

    If a value is not valid JSON, the result is empty, because the engine refuses the request.
    """
    names = CACHE_FIELDS & body.fields.keys()
    if not names:
        return NONE
    try:
        fields = {name: msgspec.json.decode(body.fields[name]) for name in names}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return NONE
    return frozenset(engine.name for engine in ENGINES.values() if engine.skips_cache(fields))
