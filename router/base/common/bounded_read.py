# SPDX-License-Identifier: Apache-2.0
"""The body of an engine's or a server's answer, no more of it than it may have."""

from __future__ import annotations

import aiohttp


async def read_at_most(answer: aiohttp.ClientResponse, most_bytes: int) -> tuple[bytes, bool]:
    """The body, and whether it is all of it; else it goes on beyond `most_bytes`."""
    parts: list[bytes] = []
    size_bytes = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > most_bytes:
            return b"".join(parts), False
    return b"".join(parts), True


async def read_whole(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """All of the body. Raises ValueError for one of more than `most_bytes`."""
    body, whole = await read_at_most(answer, most_bytes)
    if not whole:
        raise ValueError(f"its answer has more than {most_bytes} bytes")
    return body
