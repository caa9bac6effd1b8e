# SPDX-License-Identifier: Apache-2.0
"""The body of a choice, with the fields of a text that the router takes from beside it."""

from __future__ import annotations

from typing import Any

from kvrouter.contract import choices


class SelectBody(choices.SelectBody, kw_only=True):
    """A prompt to place. Exactly one of token_ids, block_hashes, prompt and messages is set."""

    # Fields beside `prompt` and `messages` that count as in OpenAI's API (tools, chat_template_kwargs ...).
    extra: dict[str, Any] | None = None
