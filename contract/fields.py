# SPDX-License-Identifier: Apache-2.0
"""Types of fields that several bodies or answers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

MAX_NUM_TOKENS = 2**31 - 1

Model = Annotated[str, Meta(description="the model's name")]
ModelGiven = Annotated[
    str | None, Meta(description="the model's name; may be absent where a model named default is registered")
]
ModelName = Annotated[str | None, Meta(description="the model's name, as Dynamo's clients name it")]
Modelname = Annotated[str | None, Meta(description="the model's name, as Mooncake's clients name it")]
RoutingGroup = Annotated[str, Meta(description="always default; Dynamo's clients read it")]
RoutingGroupGiven = Annotated[str | None, Meta(description="default, or absent")]
LoraName = Annotated[str | None, Meta(description="the LoRA adapter; part of block hashes")]
CacheSalt = Annotated[str | None, Meta(description="the cache salt of the request to the engine; part of block hashes")]
WorkerIds = Annotated[Sequence[str | int] | None, Meta(description="only these workers")]

WorkerName = Annotated[str | int, Meta(description="the worker's id; a number if it was registered as one")]
WorkerId = Annotated[str, Meta(description="the worker's id as text")]
DpRank = Annotated[int, Meta(description="data-parallel rank")]
RequestRank = Annotated[
    int | None,
    Meta(
        description="the value of `x-data-parallel-rank` for a request to `endpoint`, which counts from the first rank behind "
        "that address; absent: do not send it"
    ),
]
Endpoint = Annotated[str | None, Meta(description="the engine's HTTP address; null for a worker without one")]
State = Annotated[str, Meta(description="state of the worker's event stream (docs/reference/states.md)")]

TokenIds = Annotated[
    Sequence[int], Meta(description=f"the ids of all tokens of the prompt, each 0 to {MAX_NUM_TOKENS}")
]
BlockHashes = Annotated[
    Sequence[int | str],
    Meta(description="block hashes from block 0, at the hash block size: u64, i64 or hex (16, 32 or 64 digits)"),
]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_NUM_TOKENS)]
NonNegative = Annotated[int, Meta(ge=0)]
