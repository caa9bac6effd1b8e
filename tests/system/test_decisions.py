# SPDX-License-Identifier: Apache-2.0
"""Explanations of past decisions, by a whole router in front of simulated replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.event_reader import EventReader
from tests.support.fleet import until, wait_live
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterError, RouterProcess

PROMPT = list(range(1, 401))


pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with replicas(2, "--shape", "gemma3", "--blocks", "600") as endpoints:
        flags = ["--decisions-kept", "50", *worker_flags(endpoints)]
        with RouterProcess(tmp_path_factory.mktemp("router"), flags) as started:
            for number in range(2):
                complete(started, [number + 1_000] * 100, {"x-kvrouter-worker": f"w{number}"})
            wait_live(started)
            yield started


def complete(router: RouterProcess, prompt: list[int], headers: dict[str, str]) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    return router.request("POST", "/v1/completions", body, headers=headers)


def test_a_dry_run_is_no_decision(router: RouterProcess) -> None:
    names = (
        "chosen_hit_tokens_total",
        "achievable_hit_tokens_total",
        "prompts_total",
        "choice_seconds",
        "decide_seconds",
    )

    def counted() -> list[str]:
        wanted = tuple(f"kvrouter_{name}" for name in names)
        return [line for line in router.text("/metrics").splitlines() if line.startswith(wanted)]

    text = {"model": MODEL, "prompt": "a text of some words " * 40, "selection_id": "dry"}
    router.request("POST", "/select", text | {"selection_id": "sent"})
    until(
        lambda: router.request("POST", "/select", text | {"dry_run": True})["tokens"]["source"] != "none", "no tokens"
    )
    before = counted()
    for prompt in (text, {"model": MODEL, "token_ids": [1_000] * 100, "selection_id": "dry"}):
        router.request("POST", "/select", prompt | {"dry_run": True, "explain": True})
    assert counted() == before
    with pytest.raises(RouterError, match="404"):
        router.request("GET", "/decisions/dry")
    assert router.request("GET", "/decisions/sent")["selection_id"] == "sent"


def test_a_request_is_explained_later_with_what_came_of_it(router: RouterProcess) -> None:
    with EventReader(router.port, "?type=decision") as reader:
        complete(router, PROMPT, {"x-request-id": "first"})
        first = router.request("GET", "/decisions/first")
        until(lambda: router.worker(first["worker_id"])["residency"].get("g0:GPU", 0) > 20, "its blocks are known")
        complete(router, PROMPT, {"x-request-id": "second"})

        def is_shown() -> bool:
            # Only some decisions a second are shown, so send requests until one is.
            complete(router, PROMPT, {"x-request-id": "third"})
            return len(reader.events) >= 1

        until(is_shown, "a decision is shown")
    second = router.request("GET", "/decisions/second")
    assert second["worker_id"] == first["worker_id"] and second["num_tokens"] == len(PROMPT)
    outcome = second["outcome"]
    assert outcome["outcome"] == "ok" and outcome["predicted_tokens"] == outcome["delivered_tokens"] > 300
    assert outcome["prompt_tokens"] == len(PROMPT) and outcome["completion_tokens"] == 2
    assert second["overlap"]["disk"] == outcome["predicted_tokens"] and second["proof"] == "exact"
    chosen, other = second["candidates"]
    assert chosen["worker_id"] == second["worker_id"] and chosen["cost"] < other["cost"]
    assert other["overlap"]["disk"] == 0 and other["limited_by"]["why"]
    taken_off = sum(chosen["parts"][name] for name in ("copy", "junction", "session"))
    assert chosen["cost"] == sum(chosen["parts"].values()) - 2 * taken_off
    assert router.request("GET", f"/decisions/{second['selection_id']}") == second
    assert router.request("GET", "/decisions/first") == first | {
        "outcome": router.request("GET", "/decisions/first")["outcome"]
    }


def test_a_choice_without_a_request_is_explained_too(router: RouterProcess) -> None:
    chosen = router.request("POST", "/select", {"model": MODEL, "token_ids": PROMPT[:64], "selection_id": "mine"})
    decision = router.request("GET", f"/decisions/{chosen['selection_id']}")
    assert decision["reason"] == chosen["reason"] and decision["outcome"] is None and decision["request_id"] == ""
    newest = router.request("GET", "/decisions?limit=1")["decisions"]
    assert [row["selection_id"] for row in newest] == [chosen["selection_id"]] and "candidates" not in newest[0]


def test_as_many_are_kept_as_was_set(router: RouterProcess) -> None:
    for _ in range(60):
        router.request("POST", "/select", {"model": MODEL, "token_ids": PROMPT[:16]})
    assert len(router.request("GET", "/decisions?limit=1000")["decisions"]) == 50
    with pytest.raises(RouterError, match=r"gave 404: .*unknown_decision"):
        router.request("GET", "/decisions/first")


@pytest.mark.parametrize(
    ("path", "status"), [("/decisions?limit=0", 400), ("/decisions?limit=x", 400), ("/decisions/%0a", 404)]
)
def test_wrong_questions_are_refused(router: RouterProcess, path: str, status: int) -> None:
    with pytest.raises(RouterError, match=f"gave {status}"):
        router.request("GET", path)
