# SPDX-License-Identifier: Apache-2.0
"""A client's JSON body as its fields. Pure; passes over the body once and keeps its bytes.

Nearly all of a long completion is an array of token ids, which is read on the way: msgspec would skip it number by
number.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.json_numbers import split_integers

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
EMBEDDINGS_PATH = "/v1/embeddings"
MESSAGES_PATH = "/v1/messages"

# By path, the field that may be an array of token ids.
ID_FIELDS = {TEXT_PATH: (b"prompt",), EMBEDDINGS_PATH: (b"input",)}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ClientBody(msgspec.Struct, frozen=True, eq=False, gc=False):
    """raw: as it came. fields: each as the JSON that the client wrote; null for an array of plain integers in
    ID_FIELDS, which is in ids (uint64, negative ones as two's complement)."""

    raw: bytes
    fields: dict[str, msgspec.Raw]
    ids: NDArray[np.uint64] | None = None


def read_client_body(path: str, raw: bytes) -> ClientBody:
    """The body of a request to `path`. Raises BadQuestion."""
    names = ID_FIELDS.get(path)
    split = None if names is None else split_integers(raw, 0, names)
    if split is not None:
        rest, _, ids = split
        try:
            return ClientBody(raw, _fields.decode(rest), ids)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # The place of the error in the whole body is part of the text.
            pass
    try:
        return ClientBody(raw, _fields.decode(raw))
    except msgspec.ValidationError:
        raise BadQuestion("the body is not a JSON object; send one as in OpenAI's API") from None
    except RecursionError:
        raise BadQuestion("the body is nested too deeply", code="malformed_body") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise BadQuestion(f"the body is not JSON: {error}", code="malformed_body") from None
