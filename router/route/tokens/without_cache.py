# SPDX-License-Identifier: Apache-2.0
"""The kinds of engines that reuse nothing for a request, because it needs the whole prompt computed. Pure."""

from __future__ import annotations

import msgspec

from kvrouter.router.model.engines.engine import CACHE_FIELDS, CACHE_PARAMS, SAMPLING_PARAMS
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.route.tokens.client_body import TOO_LONG, ClientBody, value_of

NONE: frozenset[str] = frozenset()
ALL = frozenset(engine.name for engine in ENGINES.values())


def engines_without_cache(body: ClientBody) -> frozenset[str]:
    """Return the names of the engines that reuse nothing for this request.

    If a value is not valid JSON, the result is empty, because the engine refuses the request. If `sampling_params` is too
    long to be read, nothing is known to be reused.
    """
    names = CACHE_FIELDS & body.fields.keys()
    if not names:
        return NONE
    try:
        fields = {name: value_of(body.fields[name]) for name in names}
        # /inference/v1/generate has some of the fields in an object of their own.
        params = fields.pop(SAMPLING_PARAMS, None)
        if params is TOO_LONG:
            return ALL
        if isinstance(params, dict):
            fields |= {name: params[name] for name in CACHE_PARAMS & params.keys()}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return NONE
    return frozenset(engine.name for engine in ENGINES.values() if engine.skips_cache(fields))
