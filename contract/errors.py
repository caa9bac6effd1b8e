# SPDX-License-Identifier: Apache-2.0
"""The answer to every request that fails, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ErrorDetailReply(msgspec.Struct, frozen=True):
    """The cause and the fix for people; type and code for programs."""

    message: Annotated[str, Meta(description="cause and fix in one line, for people")]
    type: Annotated[str, Meta(description="invalid_request_error, rate_limit_error or server_error")]
    code: Annotated[str, Meta(description="the kind of error, for programs")]


class ErrorReply(msgspec.Struct, frozen=True):
    """The answer to every request that fails."""

    error: Annotated[ErrorDetailReply, Meta(description="the error")]
