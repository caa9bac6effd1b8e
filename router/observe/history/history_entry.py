# SPDX-License-Identifier: Apache-2.0
"""The entries by which router processes share their traffic: the sums of one step, on a stream in Redis. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrouter.router.base.common.checksum import seal, unseal
from kvrouter.router.route.load.traffic_sums import NO_MODEL, TTFT_CLASSES, ModelSums

# Models with sums of their own; all others share `other`.
MAX_MODELS = 16
OTHER = NO_MODEL
# Longer names, and names that cannot be written as UTF-8, share `other` too, so that an entry stays small.
MAX_NAME_BYTES = 200
# The name under which an entry's checksum is made.
_SEALED = "history"
# Room for 2**15 such sums in 64 bits. An engine that reports wrong tokens can cause a larger one, with which the whole
# entry would be refused.
MAX_COUNT = 2**48
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


def clamp(number: float) -> int:
    """Return a sum as a whole number that an entry can have."""
    return round(min(number, MAX_COUNT))


class ModelStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sums of one model in one step."""

    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
    requests: Count
    failed: Count
    prompt_tokens: Count
    delivered_tokens: Count
    predicted_tokens: Count
    possible_tokens: Count
    chosen_tokens: Count
    # Microseconds, so that sums of sums are exact.
    saved_us: Count
    # The number of answers by class of their time to the first token: each class's index, followed by its count.
    ttft: Annotated[list[Count], msgspec.Meta(max_length=2 * TTFT_CLASSES)]

    @classmethod
    def of(cls, model: str, sums: ModelSums) -> ModelStep:
        """Return the sums of a model in the form that an entry contains."""
        return cls(
            model,
            sums.requests,
            sums.failed,
            clamp(sums.prompt_tokens),
            clamp(sums.delivered_tokens),
            clamp(sums.predicted_tokens),
            clamp(sums.possible_tokens),
            clamp(sums.chosen_tokens),
            clamp(sums.saved_s * 1e6),
            [number for index, count in enumerate(sums.ttft) if count for number in (index, count)],
        )

    def sums(self) -> tuple[int, ...]:
        """Return the sums in the order of the fields."""
        return (
            self.requests,
            self.failed,
            self.prompt_tokens,
            self.delivered_tokens,
            self.predicted_tokens,
            self.possible_tokens,
            self.chosen_tokens,
            self.saved_us,
        )

    def plus(self, other: ModelStep) -> ModelStep:
        """Return the sums of both."""
        counts = dict(zip(self.ttft[::2], self.ttft[1::2], strict=True))
        for index, count in zip(other.ttft[::2], other.ttft[1::2], strict=True):
            counts[index] = counts.get(index, 0) + count
        sums = {name: clamp(getattr(self, name) + getattr(other, name)) for name in SUM_NAMES}
        return ModelStep(self.model, **sums, ttft=[number for pair in counts.items() for number in pair])

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.sums()) and not self.ttft


# The names of the sums, in order.
SUM_NAMES = ModelStep.__struct_fields__[1:-1]


class HistoryEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The traffic that one process counted in one step, or a part of it."""

    # Identifies one run of a process: a restart gets another name.
    writer: Annotated[str, msgspec.Meta(max_length=64)]
    # Increases with each entry of the writer on this stream, so that an entry that is read twice counts once.
    number: Count
    # When the step began, in seconds since 1970 on the clock of Redis.
    start_s: Count
    models: Annotated[list[ModelStep], msgspec.Meta(max_length=MAX_MODELS + 1)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HistoryEntry).decode


def encode(entry: HistoryEntry) -> bytes:
    """Return the entry as it is stored, with its checksum."""
    return seal(_SEALED, _encode(entry))


def decode(data: bytes) -> HistoryEntry | None:
    """Return a stored entry, or None if it is damaged."""
    try:
        entry = _decode(unseal(_SEALED, data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    sound = all(
        len(step.ttft) % 2 == 0 and all(index < TTFT_CLASSES for index in step.ttft[::2]) for step in entry.models
    )
    return entry if sound else None


def fits(model: str) -> bool:
    """Return whether a model's name is short enough for an entry, and can be encoded."""
    try:
        return len(model.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def in_order(model: str) -> tuple[bool, str]:
    """Return the key by which models are sorted: by name, and OTHER last."""
    return model == OTHER, model
