# SPDX-License-Identifier: Apache-2.0
"""`GET /events`: the fleet's events as Server-Sent Events, for as long as the client stays."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from kvrouter.contract.fleet_event import EventType
from kvrouter.router.base.common.errors import BadQuestion, RouterError, TooManyConnections
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.follow.feed.backlog import Backlog, Chunk, HeldChunks
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.feed.fleet_event import EventFilter
from kvrouter.router.model.upstream.connection import AnswerHead
from kvrouter.router.serve.api.openapi import EVENTS as PATH
from kvrouter.router.serve.proxy.downstream import Client
from kvrouter.router.serve.proxy.headers import Headers, header

LAST_EVENT_ID = b"last-event-id"
# A proxy must not buffer or cache the events.
HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
PARAMETERS = ("model", "worker", "type", "hashes")
FLAGS = {"true": True, "1": True, "false": False, "0": False}


class EventStream:
    """The handler of `GET /events`: it answers the clients of the feed."""

    def __init__(self, feed: EventFeed) -> None:
        self._feed = feed

    async def forward(self, client: Client) -> None:
        """Send events to the client until it is gone, reads too slowly, or the router stops."""
        try:
            wanted = filter_of(client.url)
            if (refusal := self._feed.refusal) is not None:
                raise TooManyConnections(refusal)
        except RouterError as error:
            client.refuse(error, [])
            return
        last_id = header(client.headers, LAST_EVENT_ID)
        subscriber = _Subscriber(client, self._feed.held)
        client.begin(AnswerHead(200, b"OK", [], None), HEADERS, subscriber)
        try:
            self._feed.subscribe(wanted, subscriber, None if last_id is None else last_id.decode("latin-1"))
            await subscriber.ended.wait()
            subscriber.finish()
        finally:
            self._feed.unsubscribe(wanted, subscriber)
            subscriber.drop()


class _Subscriber:
    """One client, as the feed sees it.

    Its connection holds a piece or two; all other bytes wait in the backlog and are counted against the client.
    """

    def __init__(self, client: Client, held: HeldChunks) -> None:
        self._client = client
        self._backlog = Backlog(held)
        self._is_paused = False
        # The comment to send before the answer ends regularly. If it is None, the connection is broken off instead.
        self._comment: bytes | None = None
        self.ended = asyncio.Event()

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that the client has not taken, here and in its connection."""
        return self._backlog.size_bytes + self._client.unread_bytes

    def send(self, chunk: Chunk) -> None:
        """Send whole events, at once or when the client reads again."""
        if not self.ended.is_set():
            self._backlog.append(chunk)
            self._pass_on()

    def end(self, comment: bytes) -> None:
        """End the answer, and drop the bytes that the client has not read."""
        if not self.ended.is_set():
            # A client drops half an event at the end of an answer, but would read a comment as the other half. So an
            # answer that ends within an event gets no comment.
            self._comment = None if self._backlog.is_within_chunk else comment
            self.drop()

    def finish(self) -> None:
        """End the answer."""
        if self._comment is None:
            self._client.break_off()
        else:
            self._client.send([self._comment])
            self._client.finish()

    def drop(self) -> None:
        """Send nothing more, and release the backlog."""
        self.ended.set()
        self._backlog.clear()

    def pause(self) -> None:
        """Stop sending, because the connection is full."""
        self._is_paused = True

    def resume(self) -> None:
        """Send the backlog on, because the client reads again."""
        self._is_paused = False
        self._pass_on()

    def _pass_on(self) -> None:
        """Send the backlog until the connection is full."""
        while self._backlog.size_bytes and not self._is_paused and not self.ended.is_set():
            # Sending may call `pause` or `end`.
            self._client.send(self._backlog.take())


def filter_of(url: bytes) -> EventFilter:
    """Return the events that a request's query selects. Raises BadQuestion if the query is not valid."""
    query = url.partition(b"?")[2].decode("ascii", "replace")
    parameters = parse_qs(query, keep_blank_values=True)
    for name in parameters:
        if name not in PARAMETERS:
            raise BadQuestion(f"parameter {printable(name)} is not known; {PATH} takes {', '.join(PARAMETERS)}")
    types = {part for text in parameters.get("type", []) for part in text.split(",")}
    known_types = [event_type.value for event_type in EventType]
    for unknown_type in sorted(types - set(known_types)):
        raise BadQuestion(
            f"parameter type: {printable(unknown_type)} is no event; write some of {', '.join(known_types)}"
        )
    flag = parameters.get("hashes", ["false"])[-1].lower()
    if flag not in FLAGS:
        raise BadQuestion(f"parameter hashes: {printable(flag)} is neither true nor false")
    return EventFilter(
        frozenset(parameters["model"]) if "model" in parameters else None,
        frozenset(parameters["worker"]) if "worker" in parameters else None,
        # Lost events are always announced.
        frozenset(map(EventType, types)) | {EventType.LOST} if types else None,
        FLAGS[flag],
    )
