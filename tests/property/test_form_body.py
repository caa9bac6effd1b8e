# SPDX-License-Identifier: Apache-2.0
"""The model of a form is the one that Starlette, with which engines read forms, finds in the same bytes.

Replacing the model's name changes nothing else in the form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.serve.proxy.form_body import MAX_MODEL_BYTES, MAX_PARTS, read_form_model

BOUNDARY = "x7MA4YWxk"
KIND = f"multipart/form-data; boundary={BOUNDARY}"

PART = st.tuples(
    st.sampled_from(["model", "file", "language", "Model", "model "]),
    st.none() | st.sampled_from(["a.wav", "model"]),
    st.binary(max_size=40) | st.text(max_size=12).map(str.encode),
)


def form(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    pieces = []
    for name, file, value in parts:
        filename = "" if file is None else f'; filename="{file}"'
        pieces.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n'.encode())
        pieces += [value, b"\r\n"]
    return b"".join([*pieces, f"--{BOUNDARY}--\r\n".encode()])


def as_starlette(body: bytes) -> list[str]:
    """Return every text field named `model`, as Starlette reads it."""

    async def read() -> list[str]:
        async def stream() -> AsyncGenerator[bytes, None]:
            yield body
            yield b""

        form_data = await MultiPartParser(Headers({"content-type": KIND}), stream()).parse()
        try:
            return [value for value in form_data.getlist("model") if isinstance(value, str)]
        finally:
            await form_data.close()

    return asyncio.run(read())


@given(st.lists(PART, max_size=5))
def test_it_is_the_one_that_an_engine_reads(parts: list[tuple[str, str | None, bytes]]) -> None:
    body = form(parts)
    try:
        wanted = as_starlette(body)
    except (MultiPartException, UnicodeDecodeError):
        wanted = []
    try:
        form_model = read_form_model(KIND.encode(), body)
    except BadQuestion:
        # There are several such fields, or one that is not text: a form that an engine would have to guess at is
        # refused.
        values = [value for name, file, value in parts if name == "model" and file is None]
        assert len(values) != 1 or not _is_text(values[0])
        return
    assert ([] if form_model.name is None else [form_model.name]) == wanted
    if form_model.name:
        renamed = form_model.renamed(body, "another")
        assert as_starlette(renamed) == ["another"]
        assert len(renamed) == len(body) - len(form_model.name.encode()) + len("another")


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_no_body_and_no_header_does_harm(body: bytes, kind: bytes) -> None:
    for content_type in (KIND.encode(), kind, b"multipart/form-data; boundary=" + kind, None):
        with contextlib.suppress(BadQuestion):
            assert read_form_model(content_type, body).name is None or body


def test_what_is_too_much_is_refused() -> None:
    with pytest.raises(BadQuestion, match="more than 1000 parts"):
        read_form_model(KIND.encode(), form([("a", None, b"")] * (MAX_PARTS + 1)))
    with pytest.raises(BadQuestion, match="longer than"):
        read_form_model(KIND.encode(), form([("model", None, b"m" * (MAX_MODEL_BYTES + 1))]))
