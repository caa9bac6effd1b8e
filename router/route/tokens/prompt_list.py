# SPDX-License-Identifier: Apache-2.0
"""The prompts of a body that has a list of them. Pure.

An engine computes each prompt of a list as a request of its own, all at the same time. The first prompts and the last
one are looked up; of the others only the number and the length are known, which is enough for their load.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.route.tokens.prompt_tokens import estimated_tokens

# How many prompts of one list are looked up: the first ones and the last one, because vLLM's report is about the last.
# Their hits are found at once, as a choice needs them all at the same moment: 0.4 ms for 64 prompts of 2,000 tokens
# among 16 workers, 0.8 ms among 64 (benchmarks/prompt_lists.py).
MAX_PROMPTS_LOOKED_UP = 64
# The largest number of prompts times workers. Among more workers, fewer prompts are looked up in the same 0.8 ms: 16 among
# 256 workers, where 64 prompts would take 2.5 ms. A turn of ingest takes 2 ms.
MAX_HITS_LOOKED_UP = 4_096
# The most bytes of the prompts that are looked up, besides the last one: some 700,000 token ids, as many as the longest
# single prompts have.
MAX_BYTES_LOOKED_UP = 4 * 1024**2
# Longer lists are not split into prompts at all: each prompt is an object, and a body of 32 MiB may have eight million.
SPLIT_PROMPTS = 4_096

_LIST = re.compile(rb'\s*\[\s*(["\[])')
_items = msgspec.json.Decoder(list[msgspec.Raw])


class PromptList(NamedTuple):
    """The prompts of a list."""

    # The prompts to look up in their order, each as JSON. The last one is the list's last prompt. Empty if the list is
    # too long to be split.
    prompts: list[msgspec.Raw]
    num_prompts: int
    # The tokens of all prompts of token ids; of texts, an estimate.
    num_tokens: int
    # Whether `num_tokens` is exact.
    counted: bool


def looked_up_among(workers: int) -> int:
    """Return the largest number of prompts of one list that are looked up among this many workers, at least 1."""
    return max(1, min(MAX_PROMPTS_LOOKED_UP, MAX_HITS_LOOKED_UP // max(1, workers)))


def is_list(raw: bytes) -> bool:
    """Return whether the JSON begins like a list of texts or of lists, not like a text or a list of token ids."""
    return _LIST.match(raw) is not None


def prompts_of(field: msgspec.Raw) -> PromptList | msgspec.Raw:
    """Return the prompts of a list of several, or else the only prompt as JSON: a text, or a list of token ids.

    Raises:
        BadQuestion: The list is not JSON.
    """
    raw = bytes(field)
    begins = _LIST.match(raw)
    if begins is None:
        return field
    has_ids = begins[1] == b"["
    # A list of k ids has k - 1 commas, and so has a list of k lists.
    num_tokens = raw.count(b",") + 1 if has_ids else estimated_tokens(len(raw))
    # Quotes within texts are escaped. A backslash at a text's end looks like one of these, so texts may be up to twice as
    # many.
    bound = raw.count(b"[") - 1 if has_ids else (raw.count(b'"') - raw.count(b'\\"')) // 2
    if bound > SPLIT_PROMPTS:
        return PromptList([], bound, num_tokens, counted=False)
    try:
        items = _items.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadQuestion(f"prompt cannot be read: {error}", code="malformed_body") from None
    if len(items) == 1:
        return items[0]
    return PromptList(_looked_up(items), len(items), num_tokens, counted=has_ids)


def _looked_up(items: list[msgspec.Raw]) -> list[msgspec.Raw]:
    """Return the first prompts as far as the bounds allow, and the last one."""
    prompts: list[msgspec.Raw] = []
    left_bytes = MAX_BYTES_LOOKED_UP
    for item in items[: min(MAX_PROMPTS_LOOKED_UP, len(items)) - 1]:
        left_bytes -= memoryview(item).nbytes
        if left_bytes < 0:
            break
        prompts.append(item)
    return [*prompts, *items[-1:]]
