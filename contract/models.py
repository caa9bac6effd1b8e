# SPDX-License-Identifier: Apache-2.0
"""The models that requests may name: the answers of `/v1/models`, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ModelReply(msgspec.Struct, frozen=True):
    """One model."""

    id: Annotated[str, Meta(description="a name that a request's model may have")]
    object: Annotated[str, Meta(description="always model")] = "model"
    # OpenAI's clients need a number.
    created: Annotated[int, Meta(description="always 0: the date is not known")] = 0
    owned_by: Annotated[str, Meta(description="always kvrouter")] = "kvrouter"


class ModelsReply(msgspec.Struct, frozen=True):
    """All models, aliases and LoRA adapters."""

    data: Annotated[list[ModelReply], Meta(description="the models")]
    object: Annotated[str, Meta(description="always list")] = "list"
