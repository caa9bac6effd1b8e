# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers behind `kvrouter serve`, and OpenAI's client in front of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Installed with vLLM.
import openai
import zmq

from tests.engine.chat_server import ChatServer, started_together
from tests.engine.engine_process import last_published
from tests.support.fleet import until
from tests.support.router_process import RouterProcess

MODEL = "chat-tiny"
WAIT_S = 120.0
# Long, so that the router gets a prompt's tokens in time even on a machine under load.
TOKENIZE_TIMEOUT_S = 60.0


class Fleet:
    """The router, its engines by worker id, and an OpenAI client of the router."""

    def __init__(
        self, router: RouterProcess, engines: dict[str, ChatServer], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self.router = router
        self.engines = engines
        self._context = context
        self._published = dict.fromkeys(engines, -1)
        self.client: Any = client_of(f"http://127.0.0.1:{router.port}")

    def settle(self) -> None:
        """Wait until the router shows every batch that the engines published."""

        def published(name: str) -> int:
            return last_published(self._context, self.engines[name].replay_endpoint, self._published[name])

        # Query all engines at the same time, because an idle publisher answers only ten times a second.
        with ThreadPoolExecutor(len(self.engines)) as pool:
            self._published = dict(zip(self.engines, pool.map(published, self.engines), strict=True))

        def shown() -> bool:
            rows = self.router.request("GET", "/workers")["workers"]
            return {row["worker_id"]: -1 if row["seq"] is None else row["seq"] for row in rows} == self._published

        until(shown, "the router shows all that was published")


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def predicted(answer: Any) -> tuple[int | None, int, str]:
    """Return the predicted hit (None without a prediction), the tokens that the engine reused, and the worker's id."""
    hit = answer.headers.get("x-kvrouter-predicted-hit")
    details = answer.parse().usage.prompt_tokens_details
    reused = 0 if details is None else details.cached_tokens or 0
    return None if hit is None else int(hit), reused, answer.headers["x-kvrouter-worker"]


def ask(fleet: Fleet, **body: Any) -> Any:
    """Return the raw answer to a chat, or to a completion if the body has a prompt."""
    resource = fleet.client.completions if "prompt" in body else fleet.client.chat.completions
    return resource.with_raw_response.create(model=MODEL, max_tokens=body.pop("max_tokens", 4), temperature=0, **body)


@contextmanager
def chat_fleet(
    folder: Path,
    model: Path,
    arguments: Sequence[str] = (),
    servers: int = 2,
    *,
    environment: Mapping[str, str] | None = None,
    router_flags: Sequence[str] = (),
    python: str = sys.executable,
    own_arguments: Callable[[int], Sequence[str]] = lambda number: (),
) -> Iterator[Fleet]:
    """Yield servers of this model behind a router that already knows the tokens of chats.

    Args:
        folder: Where the servers and the router write their files.
        model: The folder of the servers' model.
        arguments: Further flags of `vllm serve`.
        servers: The number of servers.
        environment: Variables that are added to the servers' own.
        router_flags: Further flags of `kvrouter serve`.
        python: The interpreter of an environment that has vLLM.
        own_arguments: Returns the flags that only the server with this number has.
    """
    with ExitStack() as stack:
        engines = {
            f"w{n}": ChatServer(folder, model, [*arguments, *own_arguments(n)], environment=environment, python=python)
            for n in range(servers)
        }
        stack.enter_context(started_together(list(engines.values())))
        flags = ["--tokenize-timeout-s", str(TOKENIZE_TIMEOUT_S), *router_flags]
        for name, engine in engines.items():
            flags += ["--worker", engine.spec(name)]
        router = stack.enter_context(RouterProcess(folder / "router", flags))
        fleet = Fleet(router, engines, stack.enter_context(zmq.Context()))
        stack.callback(fleet.client.close)
        # Each engine must publish events once, and the router must verify the engines' tokenizers.
        for engine in engines.values():
            with client_of(engine.url) as client:
                client.completions.create(model=MODEL, prompt=list(range(10, 200)), max_tokens=2)
        until(lambda: all(row["state"] == "live" for row in router.request("GET", "/workers")["workers"]), "live")
        chat = [{"role": "user", "content": "the cache of an engine keeps what it computed " * 7}]
        until(lambda: predicted(ask(fleet, messages=chat))[0] is not None, "tokens of chats are known")
        yield fleet
