# SPDX-License-Identifier: Apache-2.0
"""The settings of a router process: the answer of `/settings`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class SettingsReply(msgspec.Struct, frozen=True):
    """The settings that are in force in the process."""

    settings: Annotated[
        dict[str, Any], Meta(description="the value of each setting by its name; secrets and passwords are `***`")
    ]
    waiting: Annotated[
        list[str],
        Meta(description="names of settings that have changed in the settings file and take effect after a restart"),
    ] = []
    reloaded_s: Annotated[
        float | None,
        Meta(
            description="when the settings file was last read again, in seconds since 1970; null if it has not been since "
            "the start, or if there is no such file"
        ),
    ] = None
