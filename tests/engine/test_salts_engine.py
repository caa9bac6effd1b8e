# SPDX-License-Identifier: Apache-2.0
"""Two tenants of one vLLM behind `kvrouter serve` with salts that the router makes: none reuses what the other has cached.

Each prediction is the reuse that the engine reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.support.exchange import exchange
from tests.support.fleet import settle, wait_live
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

ADMIN = "an-admin-key-of-the-router"
TENANTS = ("anna", "bert")
WORDS = "the quick brown fox jumps over the lazy dog " * 40
# Each path with a body, by the number of the prompt.
BODIES: dict[str, Any] = {
    "/v1/chat/completions": lambda n: {"messages": [{"role": "user", "content": f"{n} {WORDS}"}], "max_tokens": 2},
    "/v1/completions": lambda n: {"prompt": [n + 20] + [7, 8, 9] * 150, "max_tokens": 2},
    "/inference/v1/generate": lambda n: {
        "token_ids": [n + 40] + [7, 8, 9] * 150,
        "sampling_params": {"max_tokens": 2},
    },
    "/v1/messages": lambda n: {"messages": [{"role": "user", "content": f"{n} m {WORDS}"}], "max_tokens": 2},
    "/v1/responses": lambda n: {"input": f"{n} r {WORDS}", "max_output_tokens": 2, "store": False},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder: Path = tmp_path_factory.mktemp("salts")
    (folder / "secret").write_text("a-secret-that-is-long-enough-for-HMAC-SHA256")
    keys = [f"- {{name: {name}, scopes: [ask], key: the-key-of-tenant-{name}}}" for name in TENANTS]
    (folder / "keys.yaml").write_text("\n".join(["keys:", *keys]))
    flags = ("--enable-scale-out", "--gpu-memory-utilization", "0.2")
    settings = ["--api-keys-file", str(folder / "keys.yaml"), "--cache-salt-secret-file", str(folder / "secret")]
    with (
        ChatServer(folder, write_chat_model(folder / "model"), flags) as engine,
        RouterProcess(
            folder / "router", [*settings, "--api-key", ADMIN, "--worker", engine.spec("w0")], api_key=ADMIN
        ) as started,
    ):
        ask(started, "anna", "/v1/completions", {"prompt": [5] * 300, "max_tokens": 1})
        wait_live(started)
        yield started


def ask(router: RouterProcess, tenant: str, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Return the predicted hit, and the tokens that the engine reports as reused."""
    answer = exchange(router.port, "POST", path, {"model": "chat-tiny", **body}, bearer(f"the-key-of-tenant-{tenant}"))
    assert answer.status == 200, (path, answer.status, answer.content[:500])
    usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
    else:
        cached = (usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}).get("cached_tokens")
    return int(answer.headers.get("x-kvrouter-predicted-hit", -1)), cached or 0


@pytest.mark.parametrize("path", BODIES)
def test_a_tenant_reuses_its_own_prompts_and_none_of_anothers(router: RouterProcess, path: str) -> None:
    body = BODIES[path](1)
    for tenant in TENANTS:
        for sent_before in (False, True):
            settle(router)
            # A client's own salt, even one that another client sends, too, changes nothing.
            predicted, delivered = ask(router, tenant, path, body | {"cache_salt": "shared"})
            assert predicted == delivered, (path, tenant, predicted, delivered)
            assert (delivered > 64) is sent_before, (path, tenant, delivered)
