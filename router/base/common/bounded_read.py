# SPDX-License-Identifier: Apache-2.0
"""Bodies of answers of engines and other servers, read only up to a limit."""

from __future__ import annotations

import aiohttp


async def read_at_most(answer: aiohttp.ClientResponse, most_bytes: int) -> tuple[bytes, bool]:
    """Return the body and True, or its first part and False if it has more than `most_bytes`."""
    parts: list[bytes] = []
    size_bytes = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > most_bytes:
            return b"".join(parts), False
    return b"".join(parts), True


async def read_whole(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the whole body. Raises ValueError if it has more than `most_bytes`."""
    body, whole = await read_at_most(answer, most_bytes)
    if not whole:
        raise ValueError(f"its answer has more than {most_bytes} bytes")
    return body
