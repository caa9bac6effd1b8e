# SPDX-License-Identifier: Apache-2.0
"""The calls of the API: what is sent where, and what an answer means. Pure; both clients send and read nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import uuid4

import msgspec

from kvrouter.client.answers import EndedReply, HealthReply, QueryReply, RegisteredReply, SelectReply, WorkersReply
from kvrouter.client.bodies import QueryBody, QueryByHashBody, RegisterBody, SelectBody, UnregisterBody
from kvrouter.client.errors import AnswerUnreadable, NotFound, refusal

VERSION = "/v1"
SELECTION = "{selection_id}"
RELEASE = f"/reservations/{SELECTION}"
SUCCESS, REDIRECTION, ERROR = 200, 300, 400

Reply = TypeVar("Reply")


class Call(NamedTuple, Generic[Reply]):
    """route: as the OpenAPI document has it. is_repeatable: whether a second one does nothing that the first did not."""

    method: str
    route: str
    reply: type[Reply]
    body: msgspec.Struct | None = None
    selection_id: str = ""
    is_repeatable: bool = True

    @property
    def path(self) -> str:
        """The path below the router's URL."""
        # A dot, escaped: clients take a part of dots alone out of a path.
        return VERSION + self.route.replace(SELECTION, quote(self.selection_id, safe="").replace(".", "%2E"))

    def content(self) -> bytes | None:
        """The body as JSON. Raises TypeError for a value that JSON does not have."""
        if self.body is None:
            return None
        fields = {name: value for name, value in msgspec.structs.asdict(self.body).items() if value is not None}
        return msgspec.json.encode(fields.pop("extra", {}) | fields)

    def read(self, status: int, headers: Mapping[str, str], content: bytes) -> Reply:
        """What an answer means. Raises RequestRefused, AnswerUnreadable."""
        if status >= ERROR:
            raise refusal(status, headers, content)
        if not SUCCESS <= status < REDIRECTION:
            raise AnswerUnreadable(f"{self.method} {self.path}: answered with status {status}; is the URL a router's?")
        try:
            return msgspec.json.decode(content, type=self.reply)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise AnswerUnreadable(f"{self.method} {self.path}: {error}; is the URL a router's?") from None


def query(body: QueryBody) -> Call[QueryReply]:
    return Call("POST", "/query", QueryReply, body)


def query_by_hash(body: QueryByHashBody) -> Call[QueryReply]:
    return Call("POST", "/query_by_hash", QueryReply, body)


def select(body: SelectBody) -> Call[SelectReply]:
    return Call("POST", "/select", SelectReply, body)


def select_and_reserve(body: SelectBody) -> Call[SelectReply]:
    return Call("POST", "/select_and_reserve", SelectReply, body, is_repeatable=False)


def own_reservation(body: SelectBody) -> tuple[Call[SelectReply], str]:
    """The same under an id that is known before the answer, so that it can be released whatever becomes of that."""
    selection_id = body.selection_id or uuid4().hex
    return select_and_reserve(msgspec.structs.replace(body, selection_id=selection_id)), selection_id


def prefill_complete(selection_id: str) -> Call[EndedReply]:
    return Call("POST", f"{RELEASE}/prefill_complete", EndedReply, None, selection_id)


def release(selection_id: str) -> Call[EndedReply]:
    return Call("DELETE", RELEASE, EndedReply, None, selection_id)


def is_gone(error: NotFound) -> bool:
    """Whether it says of a reservation that there is none, and not of a path."""
    return error.code == "unknown_selection"


def workers() -> Call[WorkersReply]:
    return Call("GET", "/workers", WorkersReply)


def register(body: RegisterBody) -> Call[RegisteredReply]:
    return Call("POST", "/register", RegisteredReply, body)


def unregister(body: UnregisterBody) -> Call[RegisteredReply]:
    # The second one would find no worker.
    return Call("POST", "/unregister", RegisteredReply, body, is_repeatable=False)


def health() -> Call[HealthReply]:
    return Call("GET", "/health", HealthReply)
