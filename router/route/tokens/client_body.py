# SPDX-License-Identifier: Apache-2.0
"""The fields of a client's JSON body. Pure; it scans the body once and keeps its bytes.

A long completion is mostly an array of token ids. They are read in the same scan, because msgspec would skip the array
number by number.
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

# The fields that may be an array of token ids, by path.
ID_FIELDS = {TEXT_PATH: (b"prompt",), EMBEDDINGS_PATH: (b"input",)}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ClientBody(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A client's body, split into its fields."""

    # The body's bytes as they arrived.
    raw: bytes
    # The JSON of each field as the client wrote it; null for an array of plain integers in a field of ID_FIELDS.
    fields: dict[str, msgspec.Raw]
    # That array (uint64; negative numbers as two's complement), or None if there is none.
    ids: NDArray[np.uint64] | None = None


def read_client_body(path: str, raw: bytes) -> ClientBody:
    """Return the body of a request to `path`.

    Raises:
        BadQuestion: The body is not a JSON object.
    """
    names = ID_FIELDS.get(path)
    split = None if names is None else split_integers(raw, 0, names)
    if split is not None:
        rest, _, ids = split
        try:
            return ClientBody(raw, _fields.decode(rest), ids)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Read the whole body again, because the error's text contains its place there.
            pass
    try:
        return ClientBody(raw, _fields.decode(raw))
    except msgspec.ValidationError:
        raise BadQuestion("the body is not a JSON object; send one as in OpenAI's API") from None
    except RecursionError:
        raise BadQuestion("the body is nested too deeply", code="malformed_body") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise BadQuestion(f"the body is not JSON: {error}", code="malformed_body") from None
