# SPDX-License-Identifier: Apache-2.0
"""The engine from which another one fetches a prompt's blocks, as a request names it. Pure.

The router names a source in `kv_transfer_params.remote_kv_source`. A client's own sources are removed, because an engine
connects wherever they point. Source: vLLM 0.33.0, module `vllm.v1.kv_offload.tiering.p2p.manager`; for `kv_hints`, SGLang
0.5.23, module `managers.io_struct`, while no version of vLLM reads it from a body.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Container, Iterable, Mapping

import msgspec

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.tally import CounterSeries
from kvrouter.router.route.placement.planned_pull import SOURCE_FIELD
from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    TEXT_PATH,
    ClientBody,
    is_given,
)
from kvrouter.router.serve.proxy.kv_transfer_params import PARAMS, is_received
from kvrouter.router.serve.proxy.openai_body import Changes

# The paths whose `kv_transfer_params` vLLM passes on to the engine's core: from 0.19 on, except LATER_PATHS.
PATHS = frozenset({CHAT_PATH, TEXT_PATH, RESPONSES_PATH, MESSAGES_PATH, GENERATE_PATH})
# The paths at which vLLM drops the field up to 0.28, which has a p2p tier, and passes it on in 0.31. This project's tier
# needs 0.32.
LATER_PATHS = frozenset({GENERATE_PATH})

# The fields of PARAMS that name another engine to vLLM's p2p tier: the source of any prompt, and both sides of a hand-over.
SOURCE_FIELDS = (SOURCE_FIELD, "remote_prefiller", "remote_decoder")
# The field of a body with actions for the engine's cache, of which one may name a source.
HINTS = "kv_hints"
REMOVED_FIELDS = (*SOURCE_FIELDS, HINTS)
# Fields in which vLLM takes PARAMS as an argument of an extension, directly or in EXTRA_ARGS.
EXTENSION_FIELDS = ("sampling_params", "vllm_xargs")
EXTRA_ARGS = "extra_args"
# A body without any of these fields names no source.
NAMING_FIELDS = frozenset({PARAMS, HINTS, *EXTENSION_FIELDS})
# A value without either of these has no field PARAMS; the second begins an escaped letter.
MAY_NAME_PARAMS = (PARAMS.encode(), rb"\u")

_BEGINNING = re.compile(rb"\s*\{\s*")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

log = logging.getLogger("kvrouter.proxy")


class ClientSources:
    """The handling of the sources that clients name: they are removed and counted, unless clients are trusted."""

    def __init__(self, counts: Mapping[str, CounterSeries], *, trusted: bool) -> None:
        # The removed fields, by name.
        self._counts = counts
        self.trusted = trusted
        # The fields of which the log has a line.
        self._logged: set[str] = set()

    def count(self, removed: Iterable[str]) -> None:
        """Count the removed fields, and write a line about the first of each name."""
        for name in removed:
            self._counts[name].inc()
            if name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "a client named an engine to fetch blocks from, and the field was removed: set trust_client_kv_sources if "
                    "clients may do so; later ones are only counted",
                    extra={"field": name},
                )


def may_name_source(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a body may name a source, so that `without_sources` must look for it."""
    return not fields.keys().isdisjoint(NAMING_FIELDS)


def without_sources(fields: Mapping[str, msgspec.Raw]) -> tuple[Changes, list[str]]:
    """Return the changes that take all sources out of a body's fields, and the names of the fields that they remove.

    Raises BadQuestion if a field cannot be read.
    """
    changes: Changes = {}
    removed: list[str] = []
    if is_given(fields, HINTS):
        changes[HINTS] = None
        removed.append(HINTS)
    if is_given(fields, PARAMS):
        params = _pruned_params(bytes(fields[PARAMS]), removed)
        if params is not None:
            changes[PARAMS] = None if params == b"{}" else msgspec.Raw(params)
    for name in EXTENSION_FIELDS:
        if is_given(fields, name):
            extension = _pruned_extension(bytes(fields[name]), (PARAMS, EXTRA_ARGS), removed)
            if extension is not None:
                changes[name] = msgspec.Raw(extension)
    return changes, removed


def _pruned_params(raw: bytes, removed: list[str]) -> bytes | None:
    """Return the value of PARAMS without sources, or None if it names none. The names of sources are added to `removed`."""
    params = _object(raw)
    named = [name for name in SOURCE_FIELDS if is_given(params, name)]
    if not named:
        return None
    removed += named
    return _encoded({name: value for name, value in params.items() if name not in named})


def _pruned_extension(raw: bytes, looked_at: tuple[str, ...], removed: list[str]) -> bytes | None:
    """Return the arguments of an extension without sources, or None if they name none.

    Args:
        raw: The arguments, as JSON.
        looked_at: The arguments that may have sources.
        removed: The names of removed fields are added to it.
    """
    if not any(word in raw for word in MAY_NAME_PARAMS):
        return None
    values = _object(raw)
    pruned: dict[str, bytes] = {}
    for name in looked_at:
        if name in values:
            field = bytes(values[name])
            value = _pruned_params(field, removed) if name == PARAMS else _pruned_extension(field, (PARAMS,), removed)
            if value is not None:
                pruned[name] = value
    return _encoded({**values, **pruned}) if pruned else None


def _object(raw: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of an object, also of one that only Python's reader accepts; none if `raw` is no object.

    Raises BadQuestion if neither reader accepts it.
    """
    if not raw.lstrip().startswith(b"{"):
        return {}
    try:
        return _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in json.loads(raw).items()}
    except (ValueError, RecursionError):
        raise BadQuestion(f"{PARAMS} cannot be read: send JSON in UTF-8", code="malformed_body") from None


def _encoded(values: Mapping[str, msgspec.Raw | bytes]) -> bytes:
    """Return the JSON of an object whose values are JSON already, and whose names may have lone surrogates."""
    return (
        b"{" + b",".join(b"%b:%b" % (json.dumps(name).encode(), bytes(value)) for name, value in values.items()) + b"}"
    )


def may_pull(path: str, body: ClientBody) -> bool:
    """Return whether the router may name a source in this request, which names none itself.

    It may not where vLLM does not read it, and where the prompt's blocks come from elsewhere.
    """
    if path not in PATHS or not body.is_json:
        return False
    if not is_given(body.fields, PARAMS):
        return True
    try:
        _fields.decode(body.fields[PARAMS])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The engine reports what is wrong with it.
        return False
    return not is_received(body)


def with_source(raw: bytes, fields: Container[str], source: Mapping[str, object]) -> bytes:
    """Return the JSON object with a source; every other value keeps its bytes.

    Args:
        raw: The body, for which `may_pull` is true.
        fields: The names of the client's fields; the body has no PARAMS unless one of them is.
        source: The value of SOURCE_FIELD.
    """
    if PARAMS not in fields:
        # The rest of the body is copied without being read.
        begun = _BEGINNING.match(raw)
        assert begun is not None
        start = begun.end()
        end = b"" if raw.startswith(b"}", start) else b","
        member = b'"%b":%b' % (PARAMS.encode(), msgspec.json.encode({SOURCE_FIELD: source}))
        return b"".join((b"{", member, end, memoryview(raw)[start:]))
    body = _fields.decode(raw)
    params = _fields.decode(body[PARAMS]) if is_given(body, PARAMS) else {}
    params[SOURCE_FIELD] = msgspec.Raw(msgspec.json.encode(source))
    body[PARAMS] = msgspec.Raw(msgspec.json.encode(params))
    return msgspec.json.encode(body)
