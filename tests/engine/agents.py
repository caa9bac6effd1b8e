# SPDX-License-Identifier: Apache-2.0
"""Agents that talk to real engines through a door of the router, with OpenAI's and Anthropic's own clients.

Three kinds of conversation take turns, several of each: whole inputs to `/v1/responses`, as Codex sends them; stored
responses with `previous_response_id`, in the background too; and `/v1/messages`, as Claude Code sends them. Every
request is counted with its predicted and its delivered tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import anthropic
import openai

from tests.engine.chat_fleet import MODEL, WAIT_S, Fleet
from tests.support.compressing_client import compressing, library_of
from tests.support.fleet import until

# vLLM stores responses only with this variable (docs/reference/proxy.md).
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
# The servers' flags. Blocks of 32 tokens instead of the CPU's 128 make hits of many lengths, and there are enough for
# all conversations beside evictions of old ones.
FLAGS = ("--block-size", "32", "--num-gpu-blocks-override", "1200")
RENDER = ("--enable-scale-out",)
CODINGS = ("zstd", "gzip", "identity")
# The context of the model has 2,048 tokens. A longer conversation ends, and another one begins.
MOST_TOKENS = 1_500
OUTPUT_TOKENS = 6
# Long enough that a background response still runs when it is cancelled.
LONG_OUTPUT_TOKENS = 400
CONVERSATIONS = 3
COMMON = "the cache of an engine keeps what it computed for the next turn of a conversation " * 8
WORDS = ("router", "engine", "the cache", "tokens of", "日本", "Größe", "🙂", "3.14", "line\nline", '{"a": 1}')
# Requests whose tokens only the engine knows, because it has the conversation (docs/reference/proxy.md).
FOLLOW_UP = "follow-up by id"


def own_tokenizer(model: Path) -> tuple[str, ...]:
    """Return the flags of a router that tokenizes with a model's folder itself.

    The model's template writes whole calls of functions, which `/tokenize` gets in another order of their keys.
    """
    return ("--tokenizer", f"{MODEL}={model}")


class Reply(NamedTuple):
    """One answered request."""

    kind: str
    # The predicted hit; None if the prompt's tokens were not known.
    predicted: int | None
    # The tokens that the engine reports as reused; None for a response that was cancelled before it ended.
    delivered: int | None
    # All tokens of the prompt; None as above.
    prompt_tokens: int | None
    worker: str
    selection_id: str


class Door(NamedTuple):
    """An address that leads to the engines, with clients by the coding of their bodies."""

    name: str
    openai: dict[str, Any]
    anthropic: dict[str, Any]


@contextmanager
def door_at(name: str, port: int) -> Iterator[Door]:
    """Yield the door at a port of this machine."""
    url, options = f"http://127.0.0.1:{port}", {"api_key": "none", "max_retries": 0, "timeout": WAIT_S}
    with ExitStack() as stack:
        responses, messages = {}, {}
        for coding in CODINGS:
            client = compressing(coding, library_of(openai.DefaultHttpxClient))
            responses[coding] = stack.enter_context(
                openai.OpenAI(base_url=f"{url}/v1", http_client=client, **options)  # type: ignore[arg-type]
            )
            client = compressing(coding, library_of(anthropic.DefaultHttpxClient))
            messages[coding] = stack.enter_context(
                anthropic.Anthropic(base_url=url, http_client=client, **options)  # type: ignore[arg-type]
            )
        yield Door(name, responses, messages)


def _reply(kind: str, headers: Any, delivered: int | None, prompt_tokens: int | None) -> Reply:
    hit = headers.get("x-kvrouter-predicted-hit")
    predicted = None if hit is None else int(hit)
    return Reply(
        kind, predicted, delivered, prompt_tokens, headers["x-kvrouter-worker"], headers["x-kvrouter-selection-id"]
    )


def some(rng: Random, fewest: int = 4, most: int = 30) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))


TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Conversation(Protocol):
    """A client that continues its conversation with each request, and begins another one when it has become long."""

    def send(self, door: Door, pin: dict[str, str]) -> Reply:
        """Send the next request, with these headers, and return its reply."""
        ...


def _ended(stream: Any) -> Any:
    """Read a stream of a response to its end, and return the response of its last event."""
    *_, last = stream
    return last.response


def _create(door: Door, coding: str, kind: str, *, stream: bool = False, **body: Any) -> tuple[Any, Reply]:
    """Create a response; return it with its reply."""
    options = {"max_output_tokens": OUTPUT_TOKENS, "temperature": 0.0} | body
    raw = door.openai[coding].responses.with_raw_response.create(model=MODEL, stream=stream, **options)
    response = _ended(raw.parse()) if stream else raw.parse()
    usage = response.usage
    delivered = None if usage is None else usage.input_tokens_details.cached_tokens
    return response, _reply(kind, raw.headers, delivered, None if usage is None else usage.input_tokens)


class WholeInputs:
    """A client like Codex: each request has the instructions, the tools and all items of the conversation."""

    def __init__(self, rng: Random, number: int) -> None:
        self._rng, self._number = rng, number
        self._turn = 0
        self._begin()

    def _begin(self) -> None:
        self._instructions = COMMON + some(self._rng)
        described = {"description": some(self._rng), "parameters": TOOL_SCHEMA}
        names = ("weather", "search")[: self._rng.randint(0, 2)]
        self._tools = [{"type": "function", "name": name, "strict": False, **described} for name in names]
        self._items: list[dict[str, Any]] = []

    def send(self, door: Door, pin: dict[str, str]) -> Reply:
        rng, self._turn = self._rng, self._turn + 1
        if not self._items or self._items[-1]["type"] != "function_call_output" or rng.random() < 0.5:
            content: Any = some(rng)
            if rng.random() < 0.5:
                content = [{"type": "input_text", "text": some(rng, 1, 8)} for _ in range(rng.randint(1, 3))]
            self._items.append({"type": "message", "role": "user", "content": content})
        response, reply = _create(
            door,
            CODINGS[(self._turn + self._number) % len(CODINGS)],
            "whole input",
            stream=self._turn % 2 == 0,
            instructions=self._instructions,
            input=self._items,
            tools=self._tools,
            store=False,
            extra_headers=pin,
        )
        self._items += [item.model_dump(exclude_none=True) for item in response.output]
        if rng.random() < 0.3:
            thought = {"type": "reasoning_text", "text": some(rng)}
            self._items.append({"type": "reasoning", "id": f"rs_{self._turn}", "summary": [], "content": [thought]})
        if self._tools and rng.random() < 0.6:
            call = f"call_{self._number}_{self._turn}"
            arguments = json.dumps({"city": "Paris", "n": self._turn})
            self._items += [
                {"type": "function_call", "call_id": call, "name": "weather", "arguments": arguments},
                {"type": "function_call_output", "call_id": call, "output": some(rng)},
            ]
        if reply.prompt_tokens is not None and reply.prompt_tokens > MOST_TOKENS:
            self._begin()
        return reply


class StoredResponses:
    """A client that leaves the conversation to the engine: after the first turn it sends new items and an id alone.

    Every response is retrieved afterwards. Some run in the background, and some of those are cancelled.
    """

    def __init__(self, rng: Random, number: int) -> None:
        self._rng, self._number = rng, number
        self._turn = 0
        # The number of first turns decides in which way a conversation begins; clients start at different ones.
        self._begun = number
        self._last: str | None = None
        # The worker that has the conversation.
        self._owner = ""
        self._instructions = COMMON + some(rng)

    def send(self, door: Door, pin: dict[str, str]) -> Reply:
        rng, self._turn = self._rng, self._turn + 1
        coding = CODINGS[(self._turn + self._number) % len(CODINGS)]
        body: dict[str, Any] = {"instructions": self._instructions, "input": some(rng), "extra_headers": pin}
        if self._last is not None:
            return self._follow_up(door, coding, body)
        self._begun += 1
        way = self._begun % 4
        if way in (2, 3):
            return self._background(door, coding, body, cancels=way == 3)
        response, reply = _create(door, coding, "stored", stream=way == 0, **body)
        self._keep(door, coding, response, reply)
        return reply

    def _follow_up(self, door: Door, coding: str, body: dict[str, Any]) -> Reply:
        body["previous_response_id"] = self._last
        response, reply = _create(door, coding, FOLLOW_UP, stream=self._turn % 2 == 0, **body)
        assert reply.worker == self._owner, f"{reply.worker} got a turn of {self._owner}"
        self._keep(door, coding, response, reply)
        if self._turn % 4 == 0:
            self._last = None
        return reply

    def _background(self, door: Door, coding: str, body: dict[str, Any], *, cancels: bool) -> Reply:
        client = door.openai[coding].responses
        most = LONG_OUTPUT_TOKENS if cancels else OUTPUT_TOKENS
        raw = client.with_raw_response.create(
            model=MODEL, background=True, max_output_tokens=most, temperature=0.0, **body
        )
        response_id = raw.parse().id
        if cancels:
            assert client.cancel(response_id).status == "cancelled"
            until(lambda: client.retrieve(response_id).status == "cancelled", "the response is cancelled", WAIT_S)
            return _reply("cancelled", raw.headers, None, None)

        def ended() -> Any:
            response = client.retrieve(response_id)
            return response if response.status in ("completed", "incomplete") else None

        response = until(ended, "the background response has ended", WAIT_S)
        usage = response.usage
        reply = _reply("background", raw.headers, usage.input_tokens_details.cached_tokens, usage.input_tokens)
        self._keep(door, coding, response, reply)
        return reply

    def _keep(self, door: Door, coding: str, response: Any, reply: Reply) -> None:
        self._last, self._owner = response.id, reply.worker
        raw = door.openai[coding].responses.with_raw_response.retrieve(response.id)
        stored = raw.parse()
        assert raw.headers["x-kvrouter-worker"] == reply.worker, "another worker answered for a response"
        assert (stored.id, stored.output_text) == (response.id, response.output_text)


class Messages:
    """A client like Claude Code: a changing first line, long system blocks, tools, thinking and late reminders."""

    def __init__(self, rng: Random, number: int) -> None:
        self._rng, self._number = rng, number
        self._turn = 0
        self._begin()

    def _begin(self) -> None:
        rng = self._rng
        self._system = COMMON + some(rng)
        names = ("weather", "search")[: rng.randint(0, 2)]
        self._tools = [{"name": name, "description": some(rng), "input_schema": TOOL_SCHEMA} for name in names]
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": some(rng)}]

    def send(self, door: Door, pin: dict[str, str]) -> Reply:
        self._turn += 1
        rng, streams = self._rng, self._turn % 2 == 0
        billing = f"x-anthropic-billing-header: cc_version=2; cch={rng.randrange(1 << 20):x};"
        system = [{"type": "text", "text": text} for text in (billing, self._system)]
        system[-1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
        client = door.anthropic[CODINGS[(self._turn + self._number) % len(CODINGS)]]
        more = {"tools": self._tools} if self._tools else {}
        raw = client.messages.with_raw_response.create(
            model=MODEL,
            max_tokens=OUTPUT_TOKENS,
            system=system,
            messages=self._messages,
            stream=streams,
            extra_headers=pin,
            # The newest client has no field for it.
            extra_body={"temperature": 0.0},
            **more,
        )
        if streams:
            text, usage = _text_and_usage(raw.parse())
        else:
            message = raw.parse()
            usage = message.usage
            text = "".join(block.text for block in message.content if block.type == "text")
        reused = usage.cache_read_input_tokens or 0
        whole = usage.input_tokens + reused + (usage.cache_creation_input_tokens or 0)
        self._go_on(text)
        if whole > MOST_TOKENS:
            self._begin()
        return _reply("messages", raw.headers, reused, whole)

    def _go_on(self, text: str) -> None:
        """Append the answer, with thinking and a call of a tool now and then, and the next turn."""
        rng = self._rng
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text or "ok"}]
        if rng.random() < 0.3:
            blocks.insert(0, {"type": "thinking", "thinking": some(rng), "signature": "s"})
        question: list[dict[str, Any]] = [{"type": "text", "text": some(rng)}]
        if self._tools and rng.random() < 0.5:
            call = f"toolu_{self._number}_{self._turn}"
            blocks.append({"type": "tool_use", "id": call, "name": "weather", "input": {"city": some(rng, 1, 3)}})
            question.insert(0, {"type": "tool_result", "tool_use_id": call, "content": some(rng)})
        self._messages.append({"role": "assistant", "content": blocks})
        if rng.random() < 0.15:
            self._messages.append({"role": "system", "content": some(rng, 1, 8)})
        self._messages.append({"role": "user", "content": question})


def _text_and_usage(stream: Any) -> tuple[str, Any]:
    """Read a stream of a message to its end, and return its text and its last usage."""
    text, usage = "", None
    for event in stream:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            text += event.delta.text
        elif event.type == "message_delta":
            usage = event.usage
    return text, usage


class Line(NamedTuple):
    """The requests of one kind through one door."""

    door: str
    kind: str
    requests: int
    # The predictions that the engine's report equals, those that differ, and requests without a prediction.
    equal: int
    wrong: int
    unknown: int
    # Responses that were cancelled before the engine reported anything.
    unreported: int
    predicted_tokens: int
    delivered_tokens: int


class Tally:
    """The replies through one door, by kind."""

    def __init__(self, door: str) -> None:
        self.door = door
        self.problems: list[str] = []
        self.workers: Counter[str] = Counter()
        self._replies: dict[str, list[Reply]] = {}

    def add(self, number: int, reply: Reply) -> None:
        self._replies.setdefault(reply.kind, []).append(reply)
        self.workers[reply.worker] += 1
        if reply.predicted is None:
            if reply.kind != FOLLOW_UP:
                self.problems.append(f"{self.door}, request {number}: no prediction, {reply}")
        elif reply.delivered not in (None, reply.predicted):
            self.problems.append(f"{self.door}, request {number}: wrong, {reply}")

    def lines(self) -> list[Line]:
        return [self._line(kind, replies) for kind, replies in sorted(self._replies.items())]

    def _line(self, kind: str, replies: Sequence[Reply]) -> Line:
        compared = [reply for reply in replies if reply.predicted is not None and reply.delivered is not None]
        equal = sum(reply.predicted == reply.delivered for reply in compared)
        return Line(
            door=self.door,
            kind=kind,
            requests=len(replies),
            equal=equal,
            wrong=len(compared) - equal,
            unknown=sum(reply.predicted is None for reply in replies),
            unreported=sum(reply.predicted is not None and reply.delivered is None for reply in replies),
            predicted_tokens=sum(reply.predicted or 0 for reply in compared),
            delivered_tokens=sum(reply.delivered or 0 for reply in compared),
        )


def warm_up(fleet: Fleet, door: Door, timeout_s: float) -> None:
    """Wait until messages and responses are predicted, or until the timeout, after which they count as unknown."""
    clients = [Messages(Random(0), 0), WholeInputs(Random(0), 0)]
    for client in clients:
        try:
            until(lambda client=client: client.send(door, {}).predicted is not None, "known", timeout_s)  # type: ignore[misc]
        except AssertionError:
            continue
    fleet.settle()


def converse(
    fleet: Fleet, door: Door, requests: int, seed: int, tally: Tally, report: Callable[[int], None] = lambda _: None
) -> None:
    """Send this many requests, one at a time, each when the router knows all that the engines published.

    Args:
        fleet: The engines and the router behind the door.
        door: Where requests are sent.
        requests: The number of requests.
        seed: Decides all random choices.
        tally: Counts the replies.
        report: Called with the number of requests so far.
    """
    rng = Random(f"{seed} {door.name}")
    kinds: tuple[Any, ...] = (WholeInputs, Messages, StoredResponses)
    conversations: list[Conversation] = [
        kind(Random(rng.random()), number) for number in range(CONVERSATIONS) for kind in kinds
    ]
    workers = list(fleet.engines)
    for number in range(requests):
        # The first turns are pinned, because chance could leave a worker without a conversation.
        begins = number < len(conversations)
        pin = {"x-kvrouter-worker": workers[number % len(workers)]} if begins else {}
        fleet.settle()
        reply = conversations[number % len(conversations)].send(door, pin)
        tally.add(number, reply)
        if reply.delivered is not None and reply.kind != "background":
            outcome = fleet.router.request("GET", f"/decisions/{reply.selection_id}")["outcome"]
            if (outcome["predicted_tokens"], outcome["delivered_tokens"]) != (reply.predicted, reply.delivered):
                tally.problems.append(f"{door.name}, request {number}: the decision says {outcome}, but {reply}")
        report(number + 1)
