# SPDX-License-Identifier: Apache-2.0
"""The model that a form names (`multipart/form-data`, the type of audio requests). Pure.

The body itself is never copied. python-multipart parses the form. Engines use it too (through Starlette), so both see
the same parts.
"""

from __future__ import annotations

from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvrouter.router.base.common.errors import BadQuestion

FORM = b"multipart/form-data"
MODEL = b"model"
# Starlette's bound; an engine refuses a form with more parts.
MAX_PARTS = 1_000
MAX_MODEL_BYTES = 1_024


class FormModel(NamedTuple):
    """The model that a form names, and its place in the body."""

    # None if the form names no model.
    name: str | None
    # The bytes of the model's name are `body[start:end]`.
    start: int = 0
    end: int = 0

    def renamed(self, body: bytes, model: str) -> bytes:
        """Return the body with another model; all other bytes stay the same.

        Call it only if the name is not empty.
        """
        return b"".join((memoryview(body)[: self.start], model.encode(), memoryview(body)[self.end :]))


class _Reader:
    """A collector of the form's model. A parser that passes over the whole body in one piece calls it."""

    def __init__(self) -> None:
        self.found: FormModel | None = None
        self._parts = 0
        self._header = self._value = self._disposition = b""
        self._is_model = False
        self._start: int | None = None
        self._end = 0

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadQuestion(f"the form has more than {MAX_PARTS} parts; send fewer", code="malformed_body")
        self._disposition, self._is_model, self._start = b"", False, None

    def on_header_begin(self) -> None:
        self._header = self._value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        # A part with a file name is a file, whose content names no model.
        self._is_model = options.get(b"name") == MODEL and b"filename" not in options

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_model:
            self._start = start if self._start is None else self._start
            self._end = end

    def take(self, body: bytes) -> None:
        """Keep the part that ended if it is the model's.

        Raises BadQuestion if the form has two models, or if the model is not a valid name.
        """
        if not self._is_model:
            return
        start, end = (0, 0) if self._start is None else (self._start, self._end)
        if self.found is not None:
            raise BadQuestion("the form has more than one field model; send one", code="invalid_model")
        if end - start > MAX_MODEL_BYTES:
            raise BadQuestion(f"the form's model is longer than {MAX_MODEL_BYTES} bytes", code="invalid_model")
        try:
            self.found = FormModel(body[start:end].decode(), start, end)
        except UnicodeDecodeError:
            raise BadQuestion("the form's model is no UTF-8", code="invalid_model") from None


def read_form_model(content_type: bytes | None, body: bytes) -> FormModel:
    """Return the model that the form names.

    The model's name is None if the body is not a form, which the engine reports. Raises BadQuestion if the form is
    malformed or its model is not valid.

    Args:
        content_type: The Content-Type header, or None if it is absent.
        body: The complete body.
    """
    media_type, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if media_type != FORM or not boundary:
        return FormModel(None)
    reader = _Reader()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reader.on_part_begin,
                "on_header_begin": reader.on_header_begin,
                "on_header_field": reader.on_header_field,
                "on_header_value": reader.on_header_value,
                "on_header_end": reader.on_header_end,
                "on_headers_finished": reader.on_headers_finished,
                "on_part_data": reader.on_part_data,
                "on_part_end": lambda: reader.take(body),
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise BadQuestion(f"the body is no form: {error}", code="malformed_body") from None
    return reader.found or FormModel(None)
