# SPDX-License-Identifier: Apache-2.0
"""The page of a whole router in front of simulated replicas, in a real browser.

PAGE_IMAGES=docs/images writes a picture of every view there, light, dark and as on a phone.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser_page import BrowserPage, violations
from tests.support.fleet import until
from tests.support.replica_process import ReplicaProcess, worker_flags
from tests.support.router_process import RouterProcess

MODEL = "sim-gemma3"
VIEWS = ("overview", "fleet", "reuse", "decisions", "prompt", "events", "doctor", "store")
# Selectors of the elements that a view shows when it has its data.
READY = {
    "overview": "#overview-now a.tile >> nth=5",
    "fleet": "#fleet-workers tr[data-row] >> nth=2",
    "reuse": "#reuse-workers tbody tr",
    "decisions": "#decisions-list tbody tr",
    "prompt": "#prompt-models option",
    "events": "#events-log tbody tr",
    "doctor": "#doctor-now .well, #doctor-now .finding",
    "store": "#store-now tbody tr",
}
# Each width, and each scheme in a narrow and in a wide window: colours do not depend on the width.
WINDOWS = ((360, "light"), (768, "dark"), (1280, "dark"), (2560, "light"))
CONVERSATIONS = 14
PIECE_TOKENS = 160


def conversation(number: int, tokens: int) -> list[int]:
    return [5_000 + number * 1_000 + i % 900 for i in range(tokens)]


class Traffic:
    """Conversations that grow and begin again, one request after another, until the traffic is closed."""

    def __init__(self, router: RouterProcess, seed: int) -> None:
        self._port = router.port
        self._rng = random.Random(seed)
        self._seed = seed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        lengths = dict.fromkeys(range(CONVERSATIONS), PIECE_TOKENS)
        count = 0
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            while not self._ended.is_set():
                number, count = self._rng.randrange(CONVERSATIONS), count + 1
                body = {
                    "model": MODEL,
                    "prompt": conversation(number, lengths[number]),
                    "max_tokens": 8,
                    "stream": True,
                }
                body["stream_options"] = {"include_usage": True}
                headers = {"content-type": "application/json", "x-request-id": f"chat-{self._seed}-{count}"}
                try:
                    connection.request("POST", "/v1/completions", json.dumps(body), headers)
                    connection.getresponse().read()
                except (OSError, http.client.HTTPException):
                    # The machine is so busy that the answer timed out or broke off; the next request connects again.
                    connection.close()
                lengths[number] = PIECE_TOKENS if lengths[number] > 8 * PIECE_TOKENS else lengths[number] + PIECE_TOKENS
                self._ended.wait(0.05)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder = tmp_path_factory.mktemp("page")
    with ExitStack() as stack:
        arguments = ["--shape", "gemma3", "--blocks", "420", "--cpu-chunks", "300"]
        replicas = [stack.enter_context(ReplicaProcess(folder / f"w{number}", arguments)) for number in range(3)]
        flags = worker_flags(replica.endpoints for replica in replicas)
        started = stack.enter_context(RouterProcess(folder / "router", flags))
        for seed in range(2):
            stack.callback(Traffic(started, seed).close)
        until(lambda: len(started.request("GET", "/decisions")["decisions"]) > 60, "requests were placed")
        yield started


def shown(page: Page, view: str) -> None:
    page.wait_for_selector(READY[view], state="attached")
    if view == "decisions":
        page.click("#decisions-list [data-row] >> nth=0")
        page.wait_for_selector("#decision .bar")
    if view == "prompt":
        ask_tokens(page, conversation(3, 6 * PIECE_TOKENS))


def ask_tokens(page: Page, ids: list[int]) -> None:
    page.check("input[value=tokens]")
    page.fill("textarea", ", ".join(map(str, ids)))
    page.click("text=Show where it is cached")
    page.wait_for_selector("#prompt-answer[aria-busy=false] [data-worker]")


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_every_view_fits_its_window_and_axe_finds_nothing(
    chromium: Browser, router: RouterProcess, width: int, scheme: str
) -> None:
    with closing(
        BrowserPage(chromium, router.port, viewport={"width": width, "height": 900}, color_scheme=scheme)
    ) as tab:
        for view in VIEWS:
            page = tab.open(view)
            shown(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            assert not violations(page), view


def most_held(router: RouterProcess) -> list[int]:
    """Return the conversation of which the workers hold the most, so that there is something to see."""

    def held_tokens(ids: list[int]) -> int:
        body = {"model": MODEL, "token_ids": ids, "held": True}
        instances = router.request("POST", "/query", body)["instances"].values()
        return sum(end - first for instance in instances for place in instance["held"] for first, end in place["runs"])

    return max((conversation(number, 7 * PIECE_TOKENS) for number in range(CONVERSATIONS)), key=held_tokens)


def changes(read: Callable[[], Any], what: str) -> None:
    before = read()
    until(lambda: read() != before, f"{what} does not change")


def test_reuse_is_shown_beside_what_was_predicted_and_what_was_expected(tab: BrowserPage) -> None:
    page = tab.open("reuse")
    page.wait_for_selector("#reuse-errors tbody tr >> nth=4")
    rows = [row.split("\t") for row in page.inner_text("#reuse-errors tbody").splitlines()]
    assert [row[0].strip() for row in rows][:2] == ["Less", "Exactly as much"]
    for column in (1, 2):
        assert 99 < sum(float(row[column].strip(" %<>")) for row in rows) < 101, "each answer is in one row"


def test_every_view_changes_by_itself(tab: BrowserPage) -> None:
    page = tab.open("fleet")
    page.wait_for_selector(READY["fleet"])
    changes(lambda: page.inner_text("#fleet-workers"), "the fleet")
    page = tab.open("overview")
    changes(lambda: page.inner_text("#overview-now"), "the overview")
    changes(lambda: page.get_attribute(".chart >> nth=0", "aria-label"), "the chart of requests")
    page = tab.open("reuse")
    changes(lambda: page.inner_text("#reuse-now"), "reuse")
    changes(lambda: page.get_attribute(".chart >> nth=0", "aria-label"), "the chart of reuse")
    page = tab.open("decisions")
    changes(lambda: page.inner_text("#decisions-list"), "the list of decisions")
    page = tab.open("events")
    changes(lambda: page.inner_text("#events-log"), "the log of events")
    page.click("text=Pause")
    page.wait_for_selector("text=The last 100, paused")
    held = page.inner_text("#events-log")
    changes(lambda: page.inner_text("#events-counts"), "the counts of events")
    assert page.inner_text("#events-log") == held
    page = tab.open("store")
    page.wait_for_selector("text=Routers, and the workers whose leases they hold")


def test_the_fleet_shows_what_the_api_says(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("fleet")
    page.wait_for_selector(READY["fleet"])
    for row in router.request("GET", "/workers")["workers"]:
        key = f"{MODEL}/{row['worker_id']}"
        assert "live" in page.inner_text(f"tr[data-row='{key}']")
        page.click(f"tr[data-row='{key}'] button")
        text = page.inner_text(f"tr[data-key='{key} details']")
        assert row["url"] in text
        assert all(
            f"g{group['group_idx']} {group['kind'].replace('_', ' ')}" in text for group in row["catalog"]["groups"]
        )
    router.request("PATCH", "/workers/w2", {"state": "draining"})
    try:
        expect(page.locator(f"tr[data-row='{MODEL}/w2']")).to_contain_text("draining", timeout=30_000)
    finally:
        router.request("PATCH", "/workers/w2", {"state": "active"})


def test_a_decision_opens_to_its_reasons(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("decisions")
    decision = router.request("GET", "/decisions?limit=1")["decisions"][0]
    page.fill("input[name=id]", decision["request_id"])
    page.click("text=Explain >> nth=0")
    page.wait_for_selector("#decision .bar")
    text = page.inner_text("#decision")
    explained = router.request("GET", f"/decisions/{decision['request_id']}")
    assert decision["selection_id"] in text and explained["reason"] in text
    for candidate in explained["candidates"]:
        assert f"{candidate['cost']:,} =" in text
    page.goto(f"{tab.address}#decisions/nothing-of-this-name")
    expect(page.locator("#decision .notice")).to_contain_text("no decision")
    # The browser reports each 404 itself.
    assert all("404" in problem for problem in tab.problems)
    tab.problems.clear()


def test_the_blocks_of_a_prompt_are_those_of_the_query(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("prompt")
    seen: set[str] = set()

    def agrees() -> bool:
        """Compare the page with the API, and return whether enough places were seen.

        Traffic goes on, so the page is only compared if the API answers the same before and after it.
        """
        ids = conversation(random.randrange(CONVERSATIONS), 7 * PIECE_TOKENS)
        body = {"model": MODEL, "token_ids": ids, "explain": True, "held": True}
        before = router.request("POST", "/query", body)["instances"]
        ask_tokens(page, ids)
        if router.request("POST", "/query", body)["instances"] != before:
            return False
        for name, instance in before.items():
            panel = page.locator(f"[data-worker='{name}']")
            lanes = {
                lane.get_attribute("data-place"): lane.get_attribute("data-runs")
                for lane in panel.locator("[data-place]").all()
            }
            held = {
                f"g{entry['group_idx']}:{entry['medium']}": str(entry["runs"]).replace(" ", "")
                for entry in instance["held"]
            }
            assert lanes == (held if any(entry["runs"] for entry in instance["held"]) else {})
            assert f"Reuses {instance['longest_matched']:,} of {len(ids):,} tokens" in panel.inner_text()
            if instance["limited_by"]:
                assert instance["limited_by"]["why"] in panel.inner_text()
            seen.update(place for place, runs in held.items() if runs != "[]")
        return len(seen) > 6

    until(agrees, "groups on the GPU and on the CPU are held by some")
    assert {place.partition(":")[2] for place in seen} == {"GPU", "CPU"}


def test_a_text_and_a_chat_are_tokenized_by_the_engine(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("prompt")
    page.wait_for_selector(READY["prompt"], state="attached")
    for kind, text, body in (
        ("text", "Once upon a time", {"prompt": "Once upon a time"}),
        ("chat", '[{"role": "user", "content": "Hello"}]', {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        page.check(f"input[value={kind}]")
        page.fill("textarea", text)
        page.click("text=Show where it is cached")
        tokens = router.request("POST", "/tokenize", {"model": MODEL, **body})["tokens"]
        page.wait_for_selector(f"text={len(tokens)} tokens. Each bar is")
    page.check("input[value=chat]")
    page.fill("textarea", "no JSON")
    page.click("text=Show where it is cached")
    page.wait_for_selector("text=the chat is no JSON")


def test_what_is_focused_and_what_is_written_survive_updates(tab: BrowserPage) -> None:
    page = tab.open("decisions")
    page.fill("input[name=id]", "half a na")
    page.focus("input[name=id]")
    changes(lambda: page.inner_text("#decisions-list"), "the list of decisions")
    assert page.evaluate("document.activeElement.name") == "id" and page.input_value("input[name=id]") == "half a na"


def test_all_of_it_is_reached_by_keyboard(tab: BrowserPage) -> None:
    page = tab.open("fleet")
    page.wait_for_selector(READY["fleet"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for view in VIEWS:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.hash") == f"#{view}"
    page.keyboard.press("Enter")
    page.wait_for_selector("nav a[href='#store'][aria-current]")


def test_a_page_that_nobody_sees_asks_for_nothing(tab: BrowserPage) -> None:
    page = tab.open("fleet")
    page.wait_for_selector(READY["fleet"])
    requested: list[str] = []
    hide = (
        "Object.defineProperty(document, 'hidden', {{value: {0}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.evaluate(hide.format("true"))
    # Wait until the requests under way have ended.
    page.wait_for_timeout(500)
    page.on("request", lambda request: requested.append(request.url))
    page.wait_for_timeout(5_000)
    assert not requested
    with page.expect_request("**/events"), page.expect_request("**/workers"):
        page.evaluate(hide.format("false"))


def test_the_page_asks_for_the_key_and_keeps_it_for_the_session(chromium: Browser, tmp_path: Path) -> None:
    with RouterProcess(tmp_path, ["--api-key", "correct-horse"]) as router:
        tab = BrowserPage(chromium, router.port)
        page = tab.page
        page.goto(tab.address)
        page.fill("#login input", "wrong")
        page.click("#login button")
        page.wait_for_selector(".notice")
        page.fill("#login input", "correct-horse")
        page.click("#login button")
        page.wait_for_selector("#overview-now .tiles")
        page.reload()
        page.wait_for_selector("#overview-now .tiles")
        assert page.evaluate("Object.keys(localStorage).length") == 0 and not tab._context.cookies()
        page.click("#menu summary")
        page.click("text=Forget the key")
        page.wait_for_selector("#login")
        page.reload()
        page.wait_for_selector("#login")
        # The browser reports each 401 itself.
        assert all("401" in problem for problem in tab.problems), tab.problems
        tab.problems.clear()
        tab.close()


def test_names_of_workers_are_text_and_never_markup(chromium: Browser, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'&"
    with RouterProcess(tmp_path) as router:
        router.request("POST", "/register", {"worker_id": name, "model": name, "url": "http://127.0.0.1:9"})
        with closing(BrowserPage(chromium, router.port)) as tab:
            page = tab.open("fleet")
            page.wait_for_selector("#fleet-workers tr[data-row]")
            page.click("#fleet-workers tr[data-row] button")
            page.wait_for_selector("#fleet-workers .details")
            assert name in page.inner_text("#fleet-workers") and page.locator("main img").count() == 0
            assert name in tab.open("prompt").inner_text("#prompt-models")


def find_a_dead_engine(page: Page, router: RouterProcess) -> None:
    """Register a worker whose engine is gone, so that the doctor has something to show."""
    router.request("POST", "/register", {"worker_id": "w3", "model": MODEL, "url": "http://127.0.0.1:9"})

    def is_found() -> bool:
        page.click("#doctor-run:enabled")
        page.wait_for_selector("#doctor-run:enabled")
        return page.locator("[data-code=KV101]").count() == 1

    until(is_found, "the doctor finds the engine that is gone")


@pytest.mark.skipif("PAGE_IMAGES" not in os.environ, reason="pictures are made on demand")
@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 360, "light")]
)
def test_every_view_is_pictured(chromium: Browser, router: RouterProcess, name: str, width: int, scheme: str) -> None:
    from PIL import Image

    folder = Path(os.environ["PAGE_IMAGES"])
    folder.mkdir(exist_ok=True)
    with closing(
        BrowserPage(chromium, router.port, viewport={"width": width, "height": 800}, color_scheme=scheme)
    ) as tab:
        for view in VIEWS:
            page = tab.open(view)
            shown(page, view)
            if view == "prompt":
                ask_tokens(page, most_held(router))
                page.wait_for_selector("[data-place]")
            if view == "doctor":
                find_a_dead_engine(page, router)
            if view in ("overview", "reuse", "events"):
                page.wait_for_timeout(20_000)
            page.evaluate("scrollTo(0, 0)")
            path = folder / f"page-{view}-{name}.png"
            page.screenshot(path=path, full_page=view == "prompt" and name != "phone")
            if view == "doctor":
                router.request("DELETE", "/workers/w3")
            # Make the file as small as it can be without looking different.
            with Image.open(path) as picture:
                few = picture.convert("RGB").quantize(
                    256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
                )
            few.save(path, optimize=True)
