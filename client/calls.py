# SPDX-License-Identifier: Apache-2.0
"""The calls of the API: their paths and bodies, and the meaning of their answers. Pure, and used by both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import uuid4

import msgspec

from kvrouter.client.errors import AnswerUnreadable, NotFound, refusal
from kvrouter.client.select_body import SelectBody
from kvrouter.contract.choices import SelectReply
from kvrouter.contract.health import HealthReply
from kvrouter.contract.queries import QueryBody, QueryByHashBody, QueryReply
from kvrouter.contract.registrations import RegisterBody, RegisteredReply, UnregisterBody
from kvrouter.contract.reservations import EndedReply
from kvrouter.contract.worker_status import WorkersReply

VERSION = "/v1"
SELECTION = "{selection_id}"
RELEASE = f"/reservations/{SELECTION}"
SUCCESS, REDIRECTION, ERROR = 200, 300, 400

Reply = TypeVar("Reply")


class Call(NamedTuple, Generic[Reply]):
    """One call of the API."""

    method: str
    # As the OpenAPI document has it.
    route: str
    reply: type[Reply]
    body: msgspec.Struct | None = None
    selection_id: str = ""
    # Whether a repetition changes nothing that the first call did not change.
    is_repeatable: bool = True

    @property
    def path(self) -> str:
        """Path below the router's URL."""
        # Dots are escaped, as HTTP clients remove a part of a path that consists of dots.
        return VERSION + self.route.replace(SELECTION, quote(self.selection_id, safe="").replace(".", "%2E"))

    def content(self) -> bytes | None:
        """Return the body as JSON. Raises TypeError for a value that JSON does not have."""
        if self.body is None:
            return None
        fields = {name: value for name, value in msgspec.structs.asdict(self.body).items() if value is not None}
        return msgspec.json.encode(fields.pop("extra", {}) | fields)

    def read(self, status: int, headers: Mapping[str, str], content: bytes) -> Reply:
        """Decode an answer. Raises RequestRefused or AnswerUnreadable."""
        if status >= ERROR:
            raise refusal(status, headers, content)
        if not SUCCESS <= status < REDIRECTION:
            raise AnswerUnreadable(f"{self.method} {self.path}: answered with status {status}; is the URL a router's?")
        try:
            return msgspec.json.decode(content, type=self.reply)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise AnswerUnreadable(f"{self.method} {self.path}: {error}; is the URL a router's?") from None


def query(body: QueryBody) -> Call[QueryReply]:
    """Build the call for every worker's hit by token ids."""
    return Call("POST", "/query", QueryReply, body)


def query_by_hash(body: QueryByHashBody) -> Call[QueryReply]:
    """Build the call for every worker's hit by block hashes."""
    return Call("POST", "/query_by_hash", QueryReply, body)


def select(body: SelectBody) -> Call[SelectReply]:
    """Build the call for a choice that reserves nothing."""
    return Call("POST", "/select", SelectReply, body)


def select_and_reserve(body: SelectBody) -> Call[SelectReply]:
    """Build the call for a choice with a reservation. It is not repeatable, as each call reserves."""
    return Call("POST", "/select_and_reserve", SelectReply, body, is_repeatable=False)


def own_reservation(body: SelectBody) -> tuple[Call[SelectReply], str]:
    """Build the call for a choice with a reservation, and return it with the reservation's id.

    The id is known before the answer, so the reservation can be released even if the answer is lost.
    """
    selection_id = body.selection_id or uuid4().hex
    return select_and_reserve(msgspec.structs.replace(body, selection_id=selection_id)), selection_id


def prefill_complete(selection_id: str) -> Call[EndedReply]:
    """Build the call that ends the prefill part of a reservation."""
    return Call("POST", f"{RELEASE}/prefill_complete", EndedReply, None, selection_id)


def release(selection_id: str) -> Call[EndedReply]:
    """Build the call that ends a reservation."""
    return Call("DELETE", RELEASE, EndedReply, None, selection_id)


def is_gone(error: NotFound) -> bool:
    """Return whether the error says that the reservation does not exist, and not the path."""
    return error.code == "unknown_selection"


def workers() -> Call[WorkersReply]:
    """Build the call for the status of all workers."""
    return Call("GET", "/workers", WorkersReply)


def register(body: RegisterBody) -> Call[RegisteredReply]:
    """Build the call that adds or replaces a worker."""
    return Call("POST", "/register", RegisteredReply, body)


def unregister(body: UnregisterBody) -> Call[RegisteredReply]:
    """Build the call that drops a worker. It is not repeatable, as a second call would find no worker."""
    return Call("POST", "/unregister", RegisteredReply, body, is_repeatable=False)


def health() -> Call[HealthReply]:
    """Build the call for the router's health."""
    return Call("GET", "/health", HealthReply)
