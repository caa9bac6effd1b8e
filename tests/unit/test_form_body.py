# SPDX-License-Identifier: Apache-2.0
"""The model that a multipart form names: found wherever its part stands, and never taken from another part."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.serve.proxy.form_body import MAX_MODEL_BYTES, MAX_PARTS, FormModel, read_form_model

TYPE = b"multipart/form-data; boundary=b0"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b0\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


FILE = part("file", b"\x00\r\n--b\r\n\r\nname=model", '; filename="a.wav"\r\nContent-Type: audio/wav')
END = b"--b0--\r\n"
ODD_TYPES = [TYPE, b"multipart/form-data; boundary=\xff", b";", b'multipart/form-data; boundary="']


@given(
    st.text(min_size=1, max_size=40).filter(lambda name: len(name.encode("utf-8", "ignore")) == len(name)), st.randoms()
)
def test_the_model_is_found_among_other_parts_and_can_be_replaced(name: str, rng: object) -> None:
    name = name.replace("\r", "").replace("\n", "") or "m"
    parts = [FILE, part("model", name.encode()), part("language", b"en"), part("models", b"no")]
    rng.shuffle(parts)  # type: ignore[attr-defined]
    body = b"".join(parts) + END
    form = read_form_model(TYPE, body)
    assert form.name == name
    changed = form.renamed(body, "other")
    assert read_form_model(TYPE, changed).name == "other"
    assert changed == body.replace(part("model", name.encode()), part("model", b"other"), 1)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (TYPE, FILE + END),
        (TYPE, part("model", b"m", '; filename="m"') + END),
        (TYPE, b'--b0\r\nX: form-data; name="model"\r\n\r\nm\r\n' + END),
        (b"multipart/form-data", part("model", b"m") + END),
        (b"application/json", b'{"model": "m"}'),
        (None, part("model", b"m") + END),
        (TYPE, b""),
        # This part has no end; the engine reports that.
        (TYPE, b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nm'),
    ],
)
def test_a_form_without_a_model_part_names_none(kind: bytes | None, body: bytes) -> None:
    assert read_form_model(kind, body) == FormModel(None)


def test_an_empty_model_part_is_an_empty_name() -> None:
    assert read_form_model(TYPE, part("model", b"") + END).name == ""


@pytest.mark.parametrize(
    "body",
    [
        part("model", b"a") + part("model", b"b") + END,
        part("model", b"x" * (MAX_MODEL_BYTES + 1)) + END,
        part("model", b"\xff") + END,
        part("x", b"1") * (MAX_PARTS + 1) + END,
        b"--other\r\n",
        b"--b0\r\n" + b"A" * 10_000 + b": x\r\n\r\n",
        b"--b0\r\n" + b"A: x\r\n" * 100 + b"\r\n",
        b"--b0\r\nno header at all\r\n\r\n" + END,
    ],
)
def test_a_wrong_form_is_refused(body: bytes) -> None:
    with pytest.raises(BadQuestion):
        read_form_model(TYPE, body)


@given(st.binary(max_size=300), st.sampled_from(ODD_TYPES))
def test_any_bytes_are_read_or_refused(body: bytes, kind: bytes) -> None:
    for raw in (body, part("model", body) + END, b"--b0\r\n" + body, b"--b0" + body):
        with contextlib.suppress(BadQuestion):
            read_form_model(kind, raw)


def test_a_long_boundary_is_refused() -> None:
    with pytest.raises(BadQuestion):
        read_form_model(b"multipart/form-data; boundary=" + b"x" * 10_000, b"--x")
