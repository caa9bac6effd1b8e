# SPDX-License-Identifier: Apache-2.0
"""The client against a router that breaks off, hangs, refuses, or is absent: its retries, errors and releases.

The router is a script, because a real router cannot be made to fail at a chosen moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvrouter.client import (
    AnswerLate,
    AnswerLost,
    AnswerUnreadable,
    AsyncClient,
    Conflict,
    Forbidden,
    QueryBody,
    QueryReply,
    RegisterBody,
    RequestRefused,
    Retries,
    RouterError,
    RouterUnreachable,
    SelectBody,
    SelectReply,
    Timeouts,
    TooManyRequests,
    Unavailable,
)
from kvrouter.contract.hits import Overlap
from kvrouter.contract.reservations import EndedReply
from tests.support.client_callers import Caller
from tests.support.ports import free_port
from tests.support.scripted_engine import Asked, Script, ScriptedEngine, Wire, hang, plain, reset

ROOT = Path(__file__).resolve().parents[2]
QUERY, SELECT = QueryBody(model="m", token_ids=[1]), SelectBody(model="m", token_ids=[1])
ANSWER = msgspec.json.encode(QueryReply({}, {}))
ENDED = msgspec.json.encode(EndedReply("ok"))
AT_ONCE = Retries(count=2, first_pause_s=0.0, longest_pause_s=1.0)
PATIENCE_S = 30.0


def answer(body: bytes, status: str = "200 OK", headers: Sequence[str] = ()) -> Script:
    """Return a script that answers and closes the connection.

    On an open connection the script, which watches for a client that hangs up, would take the first byte of the next
    request for that.
    """
    return plain(body, status, [*headers, "connection: close"])


def choice(selection_id: str) -> bytes:
    return msgspec.json.encode(
        SelectReply(
            selection_id=selection_id,
            model="m",
            worker_id="w0",
            dp_rank=0,
            endpoint=None,
            overlap=Overlap(0, 0, 0, 0, {}),
            effective_prefill_tokens=1,
            reason="",
            model_name="m",
            routing_group="default",
            isl_tokens=1,
            block_size=16,
            potential_decode_blocks=1,
            reserved=True,
        )
    )


def error(status: str, code: str, *headers: str) -> Script:
    return answer(
        json.dumps({"error": {"message": f"it is {code}", "type": "t", "code": code}}).encode(), status, headers
    )


def in_turn(*scripts: Script) -> Script:
    """Return a script that answers each request with the next of the scripts, and all later ones with the last."""
    scripts_left = list(scripts)

    async def script(asked: Asked, wire: Wire) -> None:
        await (scripts_left.pop(0) if len(scripts_left) > 1 else scripts_left[0])(asked, wire)

    return script


RELEASED = answer(ENDED)


def reserving(first: Script, release: Script = RELEASED) -> Script:
    """Return a script that answers a choice with `first`, and a release with `release`."""

    async def script(asked: Asked, wire: Wire) -> None:
        await (release if asked.method == "DELETE" else first)(asked, wire)

    return script


async def chosen(asked: Asked, wire: Wire) -> None:
    await answer(choice(json.loads(asked.body)["selection_id"]))(asked, wire)


def sent(router: ScriptedEngine) -> list[str]:
    return [f"{asked.method} {asked.target}" for asked in router.asked]


Make = Callable[..., Caller]


@pytest.fixture
def make(make: Make) -> Make:
    """Create callers that retry at once."""
    return partial(make, retries=AT_ONCE)


def test_a_prefix_a_key_and_the_media_type_are_in_every_request(make: Make) -> None:
    with ScriptedEngine(answer(ANSWER)) as router:
        for prefix in ("/kv", "/kv/", "/a/b"):
            make(f"{router.url}{prefix}", api_key="k").ask("query", QUERY)
        assert sent(router) == ["POST /kv/v1/query", "POST /kv/v1/query", "POST /a/b/v1/query"]
        for asked in router.asked:
            assert asked.all("authorization") == ["Bearer k"]
            assert asked.all("content-type") == asked.all("accept") == ["application/json"]


def test_fields_that_are_not_given_are_not_sent(make: Make) -> None:
    chat = SelectBody(model="m", messages=[{"role": "user", "content": "hi"}], extra={"tools": [{}], "model": "other"})
    with ScriptedEngine(answer(choice("s"))) as router:
        make(router.url).ask("select", chat)
        (asked,) = router.asked
    # A field of the body is not changed by an entry of the same name in `extra`.
    assert json.loads(asked.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{}],
        "dry_run": False,
        "explain": False,
    }
    assert chat.extra == {"tools": [{}], "model": "other"}


def test_the_environment_sends_nothing_elsewhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with ScriptedEngine(answer(ANSWER)) as router:
        assert make(router.url).ask("query", QUERY) == QueryReply({}, {})


def test_a_port_without_a_listener_is_an_error(make: Make) -> None:
    with pytest.raises(RouterUnreachable, match="listening"):
        make(f"http://127.0.0.1:{free_port()}").ask("query", QUERY)


def test_a_router_that_hangs_is_not_waited_for_again(make: Make) -> None:
    with ScriptedEngine(hang) as router:
        with pytest.raises(AnswerLate, match="in time"):
            make(router.url, timeouts=Timeouts(answer_s=0.2)).ask("query", QUERY)
        assert sent(router) == ["POST /v1/query"]


def test_a_lost_answer_is_requested_again_where_that_changes_nothing(make: Make) -> None:
    for method, body, good in (
        ("query", QUERY, ANSWER),
        ("select", SELECT, choice("s")),
        ("register", RegisterBody(worker_id="w"), b'{"status": "ok", "worker_id": "w"}'),
        ("prefill_complete", "s", ENDED),
        ("release", "s", ENDED),
    ):
        with ScriptedEngine(in_turn(reset, reset, answer(good))) as router:
            assert make(router.url).ask(method, body) != []
            assert len(router.asked) == 3 and len(set(sent(router))) == 1
        with ScriptedEngine(reset) as router:
            with pytest.raises(AnswerLost):
                make(router.url).ask(method, body)
            assert len(router.asked) == 1 + AT_ONCE.count
        with ScriptedEngine(reset) as router:
            with pytest.raises(AnswerLost):
                make(router.url, retries=Retries(count=0)).ask(method, body)
            assert len(router.asked) == 1


def test_a_lost_reservation_is_not_made_again_but_released(make: Make) -> None:
    with ScriptedEngine(reserving(reset)) as router:
        with pytest.raises(AnswerLost):
            make(router.url).ask("select_and_reserve", SELECT)
        assert sent(router) == ["POST /v1/select_and_reserve"]
        client = make(router.url)
        with pytest.raises(AnswerLost), client.reserve(SELECT):
            pass
        client.ask("release", "other")
        own = json.loads(router.asked[1].body)["selection_id"]
        expected = ["POST /v1/select_and_reserve", f"DELETE /v1/reservations/{own}", "DELETE /v1/reservations/other"]
        assert sorted(sent(router)[1:]) == sorted(expected)
    assert SELECT.selection_id is None


@pytest.mark.parametrize(
    ("script", "kind", "releases"),
    [
        (answer(b"<html>"), AnswerUnreadable, True),
        (answer(b'{"selection_id": 1}'), AnswerUnreadable, True),
        (answer(b"\xff"), AnswerUnreadable, True),
        (answer(b'{"x":' + b"[" * 100_000), AnswerUnreadable, True),
        (answer(b"", "302 Found", ["location: http://127.0.0.1:1/"]), AnswerUnreadable, True),
        (answer(b"upstream reset", "503 Service Unavailable"), Unavailable, True),
        (answer(b"upstream reset", "502 Bad Gateway"), Unavailable, True),
        (error("500 Internal Server Error", "internal_error"), RequestRefused, True),
        (error("503 Service Unavailable", "saturated"), Unavailable, False),
        (error("409 Conflict", "conflict"), Conflict, False),
        (error("403 Forbidden", "host_not_allowed"), Forbidden, False),
        (error("418 Teapot", "other"), RequestRefused, False),
        (answer(b"not here", "404 Not Found"), RequestRefused, False),
    ],
)
def test_a_choice_without_an_answer_is_released_unless_it_was_refused(
    make: Make, script: Script, kind: type[RouterError], releases: bool
) -> None:
    with ScriptedEngine(reserving(script)) as router:
        client = make(router.url, retries=Retries(count=0))
        with pytest.raises(kind) as raised, client.reserve(SELECT):
            pass
        assert raised.value.may_have_acted is releases
        # This request comes after the release, if there is one.
        client.ask("release", "last")
        assert len(router.asked) == 2 + releases


def test_the_error_of_a_gateway_has_no_code_and_shows_what_came(make: Make) -> None:
    script = answer(b"upstream connect error" + b"x" * 9_000, "503 Service Unavailable")
    with ScriptedEngine(script) as router, pytest.raises(Unavailable) as raised:
        make(router.url).ask("query", QUERY)
    assert raised.value.code == "" and "upstream connect error" in str(raised.value) and len(str(raised.value)) < 400


def test_only_a_refusal_that_says_when_to_retry_is_retried(make: Make) -> None:
    busy = error("503 Service Unavailable", "saturated", "retry-after: 0")
    with ScriptedEngine(in_turn(busy, busy, chosen)) as router:
        body = SelectBody(model="m", token_ids=[1], selection_id="s")
        assert make(router.url).ask("select_and_reserve", body).selection_id == "s"
        assert len(router.asked) == 3
    for headers in ((), ("retry-after: 60",), ("retry-after: Wed, 25 Nov 2026 12:00:00 GMT",)):
        with ScriptedEngine(error("429 Too Many Requests", "queue_full", *headers)) as router:
            with pytest.raises(TooManyRequests) as raised:
                make(router.url).ask("query", QUERY)
            assert len(router.asked) == 1
            assert raised.value.retry_after_s == (60.0 if headers == ("retry-after: 60",) else None)


def test_a_release_that_fails_does_not_fail_what_was_done(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedEngine(reserving(chosen, reset)) as router:
        client = make(router.url)
        with caplog.at_level(logging.WARNING, "kvrouter.client"), client.reserve(SELECT) as selection:
            assert selection.selection_id
        assert len(router.asked) == 1 + 1 + AT_ONCE.count
    (record,) = [log_record for log_record in caplog.records if log_record.name.startswith("kvrouter.client")]
    assert "expires at the router" in record.message


async def test_a_task_that_is_cancelled_while_it_is_answered_ends_at_once_and_is_released_behind() -> None:
    answers = asyncio.Event()

    async def slow(asked: Asked, wire: Wire) -> None:
        await answers.wait()
        await chosen(asked, wire)

    with ScriptedEngine(reserving(slow)) as router:

        async def use(client: AsyncClient) -> None:
            async with client.reserve(SELECT):
                raise AssertionError("nothing was chosen yet")

        async with AsyncClient(router.url) as client:
            task = asyncio.create_task(use(client))
            while not router.asked:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(router.asked) == 1
            router._loop.call_soon_threadsafe(answers.set)
        own = json.loads(router.asked[0].body)["selection_id"]
        assert sent(router) == ["POST /v1/select_and_reserve", f"DELETE /v1/reservations/{own}"]
        assert router.given_up == 0


async def test_a_task_that_is_cancelled_while_it_holds_releases() -> None:
    with ScriptedEngine(reserving(chosen)) as router:
        async with AsyncClient(router.url) as client:
            held = asyncio.Event()

            async def use() -> None:
                async with client.reserve(SELECT):
                    held.set()
                    await asyncio.sleep(PATIENCE_S)

            task = asyncio.create_task(use())
            await held.wait()
            task.cancel()
            # The task is cancelled a second time during the release.
            asyncio.get_running_loop().call_soon(task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert [asked.method for asked in router.asked] == ["POST", "DELETE"]


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://h", "http://", "http://h/?x=1", "http://h/#x", ""])
def test_a_url_that_is_no_routers_is_refused(make: Make, url: str) -> None:
    with pytest.raises(ValueError, match="router's URL"):
        make(url)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "schlüssel"])
def test_a_key_that_no_router_takes_is_refused(make: Make, key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        make("http://h", api_key=key)


def test_without_its_library_the_client_says_what_to_install() -> None:
    program = "import sys; sys.modules['httpx2'] = None; import kvrouter.client"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    (need,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["client"]
    assert f"pip install '{need}'" in done.stderr.splitlines()[-1]


def test_the_client_loads_nothing_of_the_router() -> None:
    program = "import sys, kvrouter.client; print(*sorted({n.split('.')[1] for n in sys.modules if n.startswith('kvrouter.')}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["client", "contract"]
