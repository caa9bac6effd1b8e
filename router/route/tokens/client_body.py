# SPDX-License-Identifier: Apache-2.0
"""The fields of a client's JSON body. Pure; it scans the body once and keeps its bytes.

A long completion is mostly an array of token ids. They are read in the same scan, because msgspec would skip the array
number by number.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion, CutBody
from kvrouter.router.base.common.json_numbers import split_integers

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
EMBEDDINGS_PATH = "/v1/embeddings"
MESSAGES_PATH = "/v1/messages"
# The engines' own paths for prompts given as token ids.
GENERATE_PATH = "/inference/v1/generate"
SGLANG_GENERATE_PATH = "/generate"

NULL = b"null"

# The fields that may be an array of token ids, by path.
ID_FIELDS = {
    TEXT_PATH: (b"prompt",),
    EMBEDDINGS_PATH: (b"input",),
    GENERATE_PATH: (b"token_ids",),
    SGLANG_GENERATE_PATH: (b"input_ids",),
}
# The fields of bodies, in any API, that hold a prompt which is no chat: a text, token ids, or a list of either.
PROMPT_FIELDS = ("prompt", "token_ids", "input_ids", "text")

# Decoding an array of 20 MB takes 0.2 s, and one of nested arrays 5 s, during which nothing else is answered, whichever
# thread does it. A field whose valid values are short is decoded up to this size.
MAX_VALUE_BYTES = 64 * 1024
# Stands for a longer value. It is neither false nor null nor a text, so nothing is allowed or predicted because of it.
TOO_LONG = (None,)
# A field that may be long, such as messages, is decoded if it has at most this many brackets and commas, which bound its
# elements: 0.1 s. Four million characters of code, a million tokens, have a quarter as many.
MAX_ELEMENTS = 1_000_000

# The largest body that is read as Python reads it; a longer one is refused. Reading takes 3 ms for a text and 50 ms for
# numbers, and no other Python code runs meanwhile.
MAX_PYTHON_BYTES = 1024**2
# Fewer bytes than these do not show the encoding of a JSON text.
ENCODING_BYTES = 4
# Every UTF-8 body that Python reads and msgspec refuses has one of these: Python's special numbers, or half of a character.
_PYTHON_ALONE = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

# Python's special numbers, whole or cut at the end, and the first characters of an escaped surrogate.
_PYTHONS_OWN = re.compile(rb"NaN|Infinity|(?:Na?|I(?:n(?:f(?:i(?:n(?:it?)?)?)?)?)?)\Z|\\u[dD][89a-fA-F]")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_skip = msgspec.json.Decoder(msgspec.Raw)


class ClientBody(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A client's body, split into its fields."""

    # The body's bytes as they arrived.
    raw: bytes
    # The JSON of each field as the client wrote it; null for an array of plain integers in a field of ID_FIELDS.
    fields: dict[str, msgspec.Raw]
    # That array (uint64; negative numbers as two's complement), or None if there is none.
    ids: NDArray[np.uint64] | None = None
    # Whether the body is JSON in UTF-8, not something else that Python reads.
    is_json: bool = True


def is_given(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Return whether the field is given and not null."""
    value = fields.get(name)
    # A longer value is not copied for the comparison.
    return value is not None and (memoryview(value).nbytes != len(NULL) or bytes(value) != NULL)


def value_of(field: msgspec.Raw, decode: Callable[[Any], Any] = msgspec.json.decode) -> Any:
    """Return the value of a field whose valid values are short, or TOO_LONG for a longer one.

    Raises the errors of `decode`.
    """
    return TOO_LONG if memoryview(field).nbytes > MAX_VALUE_BYTES else decode(field)


def check_elements(field: msgspec.Raw, name: str) -> None:
    """Raise BadQuestion if decoding a field would hold up all other requests, because of the number of its elements."""
    if memoryview(field).nbytes <= MAX_ELEMENTS:
        return
    raw = bytes(field)
    if sum(raw.count(character) for character in (b"[", b"{", b",")) > MAX_ELEMENTS:
        raise BadQuestion(f"{name} has over {MAX_ELEMENTS:,} elements, which the router does not read")


def read_client_body(path: str, raw: bytes) -> ClientBody:
    """Return the body of a request to `path`.

    Raises:
        CutBody: The body is the beginning of a JSON object, or of what Python reads as one.
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
        kind = CutBody if _is_cut(raw) else BadQuestion
        raise kind(f"the body is not JSON: {error}", code="malformed_body") from None


def read_as_python(path: str, raw: bytes) -> ClientBody | None:
    """Return a body that `read_client_body` refuses and Python's `json.loads` reads, as engines do, or None.

    Such a body has a byte order mark, is UTF-16 or UTF-32, or has NaN, Infinity, or half of a character that UTF-16 writes
    as two. Its `raw` is the body in UTF-8, and its values are as Python writes them.
    """
    encoding = json.detect_encoding(raw)
    try:
        if encoding != "utf-8":
            raw = raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        try:
            return msgspec.structs.replace(read_client_body(path, raw), is_json=False)
        except BadQuestion:
            if len(raw) > MAX_PYTHON_BYTES or _PYTHON_ALONE.search(raw) is None:
                return None
        decoded = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(decoded, dict):
        return None
    # No engine has a field whose name is no text.
    names = [name for name in decoded if is_text(name)]
    fields = {name: msgspec.Raw(json.dumps(decoded[name]).encode()) for name in names}
    return ClientBody(raw, fields, is_json=False)


def is_text(value: str) -> bool:
    """Return whether a string has whole characters only, so that it can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_cut(raw: bytes) -> bool:
    """Return whether more bytes may complete these bytes to JSON, also to JSON that only Python reads."""
    if len(raw) < ENCODING_BYTES:
        return True
    encoding = json.detect_encoding(raw)
    try:
        if encoding != "utf-8":
            # A character at the end may be cut too.
            decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
            raw = decoder.decode(raw).encode("utf-8", "surrogatepass")
        raw = _PYTHONS_OWN.sub(_as_msgspec_reads, raw)
        _skip.decode(raw)
    except msgspec.DecodeError as error:
        # For a cut number, the error names the byte behind the last one, as it does for a superfluous last byte.
        text = str(error)
        return text.endswith(("Input data was truncated", f"(byte {len(raw)})")) and "trailing" not in text
    except (ValueError, RecursionError):
        return False
    return False


def _as_msgspec_reads(found: re.Match[bytes]) -> bytes:
    """Return bytes of the same size that msgspec reads: digits for a number, the escape of a letter for a surrogate's."""
    return b"\\u00" if found[0].startswith(b"\\") else b"1" * len(found[0])
