# SPDX-License-Identifier: Apache-2.0
"""The settings of a router process: the answer of `/settings`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class SettingsReply(msgspec.Struct, frozen=True):
    """The settings with which the process was started."""

    settings: Annotated[
        dict[str, Any], Meta(description="the value of each setting by its name; secrets and passwords are `***`")
    ]
