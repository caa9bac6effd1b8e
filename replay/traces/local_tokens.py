# SPDX-License-Identifier: Apache-2.0
"""Tokens of a trace's text by a model's own tokenizer and chat template, read as this router reads them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.replay.traces.reader import Tokenize
from kvrouter.router.base.common.errors import BadQuestion, SettingError
from kvrouter.router.base.common.extras import install_command
from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH, read_client_body
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown
from kvrouter.router.route.tokens.token_request import ListRequest, TokenRequest, read

PATHS = {"chat": CHAT_PATH, "text": TEXT_PATH}


def tokenizer_of(folder: Path) -> Tokenize:
    """Return a function that tokenizes with the files in `folder`.

    Raises SettingError, also if the extra `tokenizer` is not installed.
    """
    try:
        from kvrouter.router.route.tokens.local.local_tokenizer import LocalTokenizer
    except ImportError as error:
        raise SettingError(f"--tokenizer needs {error.name}: {install_command('tokenizer')}") from None
    tokenizer = LocalTokenizer(folder, datetime.now)
    quirks = tokenizer.likely_quirks()[0]

    def tokenize(kind: str, body: dict[str, Any]) -> NDArray[np.int64]:
        path = PATHS[kind]
        try:
            request = read(path, read_client_body(path, msgspec.json.encode(body)))
            if isinstance(request, TokenRequest):
                return tokenizer.ids(request, quirks)
            # Each prompt of a list is a body of its own here, and only the engines' own paths have further facts.
            assert not isinstance(request, Prompt | ListRequest)
            return request
        except TokensUnknown as error:
            raise ValueError(error.problem) from None
        except (BadQuestion, TypeError, UnicodeEncodeError) as error:
            raise ValueError(str(error)) from None

    return tokenize
