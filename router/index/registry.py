# SPDX-License-Identifier: Apache-2.0
"""A registration as the registry in Redis holds it: decoded and checked, as other programs may have written there.
Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.redis_client.errors import StoredValueError
from kvrouter.router.workers.registration import MAX_GROUPS, MAX_TOKENS, CatalogSpec, Registration
from kvrouter.router.workers.worker_spec import (
    endpoint_problem,
    patch_key_problem,
    patch_problem,
    url_problem,
    worker_id_problem,
)

encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Registration).decode


def decode(worker: WorkerKey, raw: bytes) -> Registration:
    """What is registered for `worker`. Raises StoredValueError."""
    try:
        registration = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        registration = None
    if registration is None or registration.worker != worker or any(_problems(registration)):
        raise StoredValueError(keys.registry(worker.model), keys.registry_field(worker), raw)
    return registration


def _problems(registration: Registration) -> Iterator[str | None]:
    """What no router registers: it would be connected to, or be a size of the kernels' tables."""
    yield worker_id_problem(registration.worker.worker_id)
    for endpoint in (registration.events, registration.replay):
        yield endpoint and endpoint_problem(endpoint)
    if registration.url is not None:
        yield url_problem(registration.url)
    if registration.patch is not None:
        yield patch_problem(registration.patch)
    if registration.patch_key is not None:
        yield patch_key_problem(registration.patch_key, registration.patch)
    yield _size_problem(registration.block_size)
    yield from _catalog_problems(registration.catalog or CatalogSpec())


def _catalog_problems(catalog: CatalogSpec) -> Iterator[str | None]:
    if len(catalog.groups) > MAX_GROUPS:
        yield "too many groups"
    for size in (catalog.hash_block_size, catalog.scheduler_block_size, catalog.offload_blocks_per_chunk):
        yield _size_problem(size)
    for group in catalog.groups:
        if group.group_idx is not None and not 0 <= group.group_idx < MAX_GROUPS:
            yield "no group"
        for size in (group.block_size, group.sliding_window, group.attention_chunk_size):
            yield _size_problem(size)


def _size_problem(size: int | None) -> str | None:
    return None if size is None or 0 < size <= MAX_TOKENS else "no size"
