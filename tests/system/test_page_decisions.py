# SPDX-License-Identifier: Apache-2.0
"""The page's decisions and findings in a real browser: filters, pause, keyboard, folded candidates, fixes, copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from kvrouter.router.observe.findings.explanations import EXPLANATIONS
from tests.support.browser_page import BrowserPage, violations
from tests.support.fleet import until, wait_live
from tests.support.ports import free_port
from tests.support.replica_process import MODEL, replicas, worker_flags
from tests.support.router_process import RouterError, RouterProcess
from tests.support.scripted_engine import ScriptedEngine, plain

REPLICAS = 7
# The usage of an engine that reuses more than anybody could predict.
SURPRISING = {
    "id": "1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}},
}
WINDOWS = {"wide": {"width": 1280, "height": 700}, "narrow": {"width": 768, "height": 500}}


def complete(router: RouterProcess, number: int, name: str, worker: str | None = None) -> None:
    body = {"model": MODEL, "prompt": [number * 1_000 + i for i in range(200)], "max_tokens": 2}
    pinned = {} if worker is None else {"x-kvrouter-worker": worker}
    router.request("POST", "/v1/completions", body, headers={"x-request-id": name, **pinned})


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Start a router with answers as predicted, three that are not, two that failed, and one of a client's mistake."""
    with ExitStack() as stack:
        endpoints = stack.enter_context(replicas(REPLICAS, "--shape", "gemma3", "--blocks", "600"))
        odd = stack.enter_context(ScriptedEngine(plain(json.dumps(SURPRISING).encode())))
        started = stack.enter_context(RouterProcess(tmp_path_factory.mktemp("router"), worker_flags(endpoints)))
        wait_live(started)
        for number in range(60):
            complete(started, number % 20, f"chat-{number}")
        started.request("POST", "/register", {"worker_id": "odd", "model": MODEL, "url": odd.url})
        started.wait_row("odd", lambda row: not row["closed"])
        for number in range(3):
            complete(started, 100 + number, f"odd-{number}", "odd")
        for number, status in enumerate(("500 Internal Server Error", "500 Internal Server Error", "400 Bad Request")):
            odd.script = plain(b'{"error": {"message": "too long"}}', status)
            with pytest.raises(RouterError, match=status[:3]):
                complete(started, 200 + number, f"bad-{number}", "odd")
        yield started


@pytest.fixture
def tab(chromium: Browser, router: RouterProcess) -> Iterator[BrowserPage]:
    options = {"viewport": WINDOWS["wide"], "permissions": ["clipboard-read", "clipboard-write"]}
    with closing(BrowserPage(chromium, router.port, **options)) as tab:
        yield tab


def listed(page: Page) -> list[str | None]:
    return [row.get_attribute("data-row") for row in page.locator("#decisions-list [data-row]").all()]


def kept(router: RouterProcess, query: str = "") -> list[str]:
    return [entry["selection_id"] for entry in router.request("GET", f"/decisions?limit=50{query}")["decisions"]]


def test_the_list_has_what_the_filters_want_and_the_address_names_them(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("decisions")
    until(lambda: listed(page) == kept(router), "all decisions are listed")
    for only, count in (("wrong", 3), ("failed", 2)):
        page.select_option("select[name=only]", only)
        expect(page.locator("#decisions-list [data-row]")).to_have_count(count)
        assert listed(page) == kept(router, f"&only={only}") and page.url.endswith(f"#decisions?only={only}")
    expect(page.locator("#decisions-list tbody tr >> nth=0")).to_contain_text("server error")
    page.fill("input[name=worker]", "w1")
    page.keyboard.press("Enter")
    expect(page.locator("#decisions-list")).to_contain_text("that chose w1, no request failed")
    page.goto(f"{tab.address}#decisions?only=wrong&worker=odd")
    page.reload()
    expect(page.locator("#decisions-list [data-row]")).to_have_count(3)
    assert page.input_value("select[name=only]") == "wrong" and page.input_value("input[name=worker]") == "odd"
    page.click("#decisions-list td >> nth=2")
    page.wait_for_selector("#decision .bar")
    assert listed(page) == kept(router, "&only=wrong&worker=odd"), "an open decision leaves the filter as it is"
    assert "48 tokens delivered of 0 predicted" in page.inner_text("#decision")


def test_a_paused_list_stands_still_until_it_is_resumed(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("decisions")
    page.wait_for_selector("#decisions-list [data-row]")
    complete(router, 1, "before")
    until(lambda: listed(page) == kept(router), "the list follows")
    page.click("#decisions-pause")
    before = listed(page)
    complete(router, 2, "meanwhile")
    expect(page.locator("#decisions-paused")).to_have_text("Paused, 1 newer.")
    assert listed(page) == before != kept(router)
    page.click("#decisions-pause")
    until(lambda: listed(page) == kept(router), "the list follows again")
    # A decision that is being read stands still too, until it is closed.
    page.click("#decisions-list td >> nth=0")
    page.wait_for_selector("#decision .bar")
    before = listed(page)
    complete(router, 3, "later")
    expect(page.locator("#decisions-paused")).to_have_text("Paused, 1 newer.")
    assert listed(page) == before
    page.click("text=Back to the list")
    until(lambda: listed(page) == kept(router), "the list follows after reading")


def test_a_decision_shows_how_many_prompts_and_answers_it_was_about(tab: BrowserPage, router: RouterProcess) -> None:
    prompts = [[7_000 + i for i in range(20)], [8_000 + i for i in range(30)], [9_000]]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 2, "n": 2}
    router.request("POST", "/v1/completions", body, headers={"x-request-id": "list"})
    page = tab.open("decisions")
    expect(page.locator("#decisions-list tbody tr >> nth=0")).to_contain_text("51 in 3")
    page.click("#decisions-list td >> nth=0")
    expect(page.locator("#decision")).to_contain_text("3 prompts, placed together, 2 answers to each: 51 tokens,")
    expect(page.locator("#decision")).to_contain_text("tokens as reused; no prediction can be compared with that")


def test_rows_open_and_close_by_keyboard(tab: BrowserPage) -> None:
    page = tab.open("decisions")
    page.wait_for_selector("#decisions-list [data-row] >> nth=3")
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = listed(page)[1]
    page.keyboard.press("Enter")
    page.wait_for_selector("#decision .bar")
    assert second is not None and second in page.inner_text("#decision")
    expect(page.locator("#decisions-list tr.chosen [data-row]")).to_have_attribute("data-row", second)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("#decisions-list tr.chosen [data-row]")).to_have_attribute("data-row", listed(page)[2] or "")
    page.keyboard.press("Escape")
    expect(page.locator("#decision")).to_be_empty()


def test_the_chosen_worker_and_four_more_are_shown_and_the_others_folded(
    tab: BrowserPage, router: RouterProcess
) -> None:
    page = tab.open("decisions")
    page.goto(f"{tab.address}#decisions/chat-50")
    rows = page.locator("#decision table.costs tbody tr")
    expect(rows).to_have_count(REPLICAS)
    decision = router.request("GET", "/decisions/chat-50")
    expect(rows.first).to_contain_text("chosen")
    assert rows.first.get_attribute("data-key") == decision["worker_id"]
    assert [row.is_visible() for row in rows.all()] == [True] * 5 + [False] * (REPLICAS - 5)
    folded = sorted(entry["cost"] for entry in decision["candidates"])[5:]
    summary = page.locator("#decision summary")
    assert summary.inner_text().startswith(f"{REPLICAS - 5} others at {folded[0]:,}")
    summary.click()
    assert all(row.is_visible() for row in rows.all())
    for entry in decision["candidates"]:
        assert f"{entry['cost']:,} =" in page.inner_text(f"#decision tr[data-key='{entry['worker_id']}']")
    # The replicas have neither a CPU tier nor a disk.
    assert "on the GPU" in page.inner_text("#decision") and "CPU" not in page.inner_text("#decision")


@pytest.mark.parametrize("window", WINDOWS)
def test_an_opened_decision_begins_below_the_header(chromium: Browser, router: RouterProcess, window: str) -> None:
    with closing(BrowserPage(chromium, router.port, viewport=WINDOWS[window])) as tab:
        page = tab.open("decisions")
        page.wait_for_selector("#decisions-list [data-row] >> nth=40")
        page.locator("#decisions-list tbody tr").nth(40).click()
        page.wait_for_selector("#decision .bar")
        page.wait_for_function(
            "() => { const top = document.getElementById('decision-title').getBoundingClientRect().top;"
            " return top >= document.querySelector('header').getBoundingClientRect().bottom && top < innerHeight / 2; }"
        )


def assert_copied(page: Page, text: str) -> None:
    until(lambda: page.evaluate("navigator.clipboard.readText()") == text, f"{text} is copied")


def test_what_a_decision_offers_is_copied(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("decisions")
    page.goto(f"{tab.address}#decisions/chat-7?only=lost")
    selection = router.request("GET", "/decisions/chat-7")["selection_id"]
    for label, text in (
        ("Copy: the request's id", "chat-7"),
        ("Copy: the selection's id", selection),
        ("Copy: the command", f"kvrouter explain --url {tab.address.rstrip('/')} --request chat-7"),
        ("Copy link: to this decision", f"{tab.address}#decisions/chat-7"),
    ):
        page.get_by_label(label, exact=True).click()
        assert_copied(page, text)
        expect(page.locator("#copied")).to_contain_text("Copied")


def test_without_a_secure_context_the_older_copy_or_the_person_copies(tab: BrowserPage) -> None:
    tab.page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', {value: undefined})")
    page = tab.open("decisions")
    page.goto(f"{tab.address}#decisions/chat-7")
    page.get_by_label("Copy: the request's id").click()
    expect(page.locator("#copied")).to_have_text("Copied the request's id.")
    page.focus("input[name=id]")
    page.keyboard.press("Control+V")
    assert page.input_value("input[name=id]") == "chat-7"
    page.evaluate("document.execCommand = () => false")
    page.get_by_label("Copy: the selection's id").click()
    page.wait_for_selector("dialog[open] textarea")
    assert page.evaluate("document.activeElement.value.slice(document.activeElement.selectionStart)") != ""
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)


def test_the_prompt_is_no_decision_and_its_command_asks_the_same(tab: BrowserPage, router: RouterProcess) -> None:
    before = kept(router)
    page = tab.open("prompt")
    page.check("input[value=tokens]")
    page.fill("textarea", ", ".join(str(5_000 + i) for i in range(200)))
    page.click("text=Show where it is cached")
    page.click("text=The same from a terminal")
    command = page.inner_text("#prompt-answer .command code")
    head, body, end = command.split("\n")
    assert head.startswith(f"curl -s {tab.address}select ") and head.endswith("-d @- <<'EOF'") and end == "EOF"
    answer = router.request("POST", "/select", json.loads(body))
    expect(page.locator("#prompt-answer h3 >> nth=0")).to_have_text(f"It would go to {answer['worker_id']}")
    assert kept(router) == before


def faulty(router: RouterProcess) -> str:
    """Register a worker whose engine is gone, and return its name."""
    address = f"http://127.0.0.1:{free_port()}"
    router.request("POST", "/register", {"worker_id": "it's gone", "model": MODEL, "url": address})
    return address


def test_the_doctor_shows_findings_with_their_fix_and_their_meaning(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("doctor")
    page.wait_for_selector("#doctor-now [data-code], #doctor-now .well")
    address = faulty(router)
    try:
        gone = page.locator("[data-code=KV101]")

        def is_found() -> bool:
            page.click("#doctor-run:enabled")
            page.wait_for_selector("#doctor-run:enabled")
            return gone.count() == 1

        until(is_found, "the doctor finds the engine that is gone")
        expect(gone).to_contain_text(address)
        expect(gone.locator("a")).to_have_attribute("href", "#fleet/it's%20gone")
        gone.get_by_label("Copy: the command").first.click()
        command = f"curl -i {address}/health"
        assert_copied(page, command)
        gone.locator("summary", has_text="What KV101 means").click()
        expect(gone).to_contain_text(EXPLANATIONS["KV101"].cause.split("`")[0].strip())
        page.goto(f"{tab.address}#doctor/it's%20gone")
        expect(page.locator("#doctor-now")).to_contain_text("Findings about it's gone alone.")
        assert gone.count() == 1
        page.goto(f"{tab.address}#doctor/w1")
        page.wait_for_selector("text=No check found anything wrong with w1.")
    finally:
        router.request("DELETE", "/workers/it's%20gone")


def test_a_finding_about_several_workers_links_to_each(tab: BrowserPage) -> None:
    """The links come from the finding's fields, so that no name is guessed from the sentence."""
    usual = {"severity": "error", "problem": "it differs", "evidence": "so it is", "fix": "mend it", "page": "p"}
    findings = [
        {"code": "KV110", "subject": "workers a and b and c", "workers": ["a and b", "c"], "model": "m"} | usual,
        {"code": "KV305", "subject": "model m", "workers": ["c", "d@1"], "model": "m"} | usual,
        {"code": "KV604", "subject": "router", "workers": [], "model": None} | usual,
    ]
    report = {"version": "1", "workers": 3, "routers": 1, "checks": 60, "findings": findings, "age_s": 0}
    body = json.dumps(report)
    tab.page.route("**/diagnosis?*", lambda route: route.fulfill(content_type="application/json", body=body))
    page = tab.open("doctor")
    links = {code: page.locator(f"[data-code={code}] [data-row]") for code in ("KV110", "KV305", "KV604")}
    expect(links["KV110"]).to_have_text(["a and b", "c"])
    expect(page.locator("[data-code=KV110] li")).to_contain_text("workers a and b and c so it is")
    expect(links["KV305"]).to_have_text(["c", "d@1"])
    expect(page.locator("[data-code=KV305] li")).to_contain_text("model m (c, d@1) so it is")
    expect(links["KV604"]).to_have_count(0)
    page.goto(f"{tab.address}#doctor/d@1")
    expect(page.locator("[data-code]")).to_have_count(1)
    page.unroute_all(behavior="ignoreErrors")


def test_many_findings_of_one_code_are_folded(chromium: Browser, tmp_path: Path) -> None:
    with RouterProcess(tmp_path) as router:
        for number in range(30):
            body: dict[str, Any] = {"worker_id": f"w{number}", "model": "m", "url": f"http://127.0.0.1:{number + 1}"}
            router.request("POST", "/register", body)
        until(lambda: len(router.request("GET", "/diagnosis")["findings"]) == 30, "every engine is found to be gone")
        for width in (390, 1280):
            with closing(BrowserPage(chromium, router.port, viewport={"width": width, "height": 900})) as tab:
                page = tab.open("doctor")
                expect(page.locator("#doctor-now h3")).to_have_text("30 errors")
                assert len([link for link in page.locator("[data-code] [data-row]").all() if link.is_visible()]) == 5
                page.click("summary:has-text('25 more')")
                assert all(link.is_visible() for link in page.locator("[data-code] [data-row]").all())
                fits(page, width)


def fits(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not violations(page)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_source_is_shown_by_a_decision_a_prompt_and_its_worker(
    chromium: Browser, router: RouterProcess, width: int
) -> None:
    peer = {"worker_id": "w6", "dp_rank": 1, "tokens": 7_936}
    pull = peer | {"fetched_tokens": 7_000, "timeout_s": 0.25}

    def lending(route: Route) -> None:
        body = route.fetch().json()
        for candidate in body.get("candidates", []):
            candidate["peer"] = peer
        for instance in body.get("instances", {}).values():
            instance["peer"] = peer
        for row in body.get("workers", []):
            row["peer"] = {"host": "fd00::7", "port": 5710}
        if "candidates" in body:
            body["pull"] = pull
        if body.get("outcome"):
            body["outcome"]["fetched_tokens"] = 6_880
        route.fulfill(content_type="application/json", body=json.dumps(body))

    def lent(route: Route) -> None:
        models = route.fetch().json()
        for load in (load for model in models for load in model["loads"]):
            load["lent_tokens"] = 7_000
        route.fulfill(content_type="application/json", body=json.dumps(models))

    with closing(BrowserPage(chromium, router.port, viewport={"width": width, "height": 900})) as tab:
        for path in ("decisions/*", "query", "select", "workers"):
            tab.page.route(f"**/{path}", lending)
        tab.page.route("**/loads", lent)
        page = tab.open("decisions")
        page.goto(f"{tab.address}#decisions/chat-50")
        text = "7,000 tokens from w6@1, waits 250 ms at most; 7,936 tokens are reused if all arrive"
        expect(page.locator("#decision dl")).to_contain_text(text)
        expect(page.locator("#decision dl")).to_contain_text("6,880 tokens fetched")
        own = router.request("GET", "/decisions/chat-50")["candidates"][0]["overlap"]["longest_matched"]
        more = f"7,936 with blocks that w6@1 lends (+{7_936 - own:,})"
        expect(page.locator("#decision tr.chosen")).to_contain_text(more)
        fits(page, width)
        page.goto(f"{tab.address}#prompt")
        page.check("input[value=tokens]")
        page.fill("textarea", "7, 7, 7")
        page.click("#prompt-ask")
        expect(page.locator("#prompt-answer [aria-label=Choice]")).to_contain_text(f"Fetches {text}.")
        expect(page.locator("[data-worker] >> nth=0")).to_contain_text("Would reuse 7,936 with blocks that w6@1 lends")
        fits(page, width)
        page.goto(f"{tab.address}#fleet/w0")
        expect(page.locator("tr.details")).to_contain_text(
            "blocks of its CPU tier, at [fd00::7]:5710, now 7,000 tokens"
        )
        fits(page, width)
        page.unroute_all(behavior="ignoreErrors")


@pytest.mark.parametrize("width", [390, 1280])
def test_an_opened_decision_fits_its_window_and_axe_finds_nothing(
    chromium: Browser, router: RouterProcess, width: int
) -> None:
    with closing(BrowserPage(chromium, router.port, viewport={"width": width, "height": 900})) as tab:
        page = tab.open("decisions")
        page.goto(f"{tab.address}#decisions/chat-50")
        page.click("#decision summary")
        fits(page, width)
