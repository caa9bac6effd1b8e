# SPDX-License-Identifier: Apache-2.0
"""The page's overview, fleet, header and shortcuts, in a real browser: for no worker, a few, and a thousand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from kvrouter.router.observe.quality.request_watch import FAILED_OUTCOMES
from kvrouter.router.serve.proxy.proxy_metrics import ANSWER_OUTCOMES
from tests.support.browser_page import BrowserPage, violations
from tests.support.fleet import until
from tests.support.replica_process import ReplicaProcess, worker_flags
from tests.support.router_process import RouterProcess

ROWS = "#fleet-workers tr[data-row]"
# The page's rows for each of its pages, and the elements that it may have with a thousand workers.
PAGE_ROWS = 100
MOST_ELEMENTS = 4_000
GRAFANA = "http://127.0.0.1:3000/d/kvrouter"
# Runs steps on a History of its own, whose requests `answer` answers, by their number.
HISTORY_SCRIPT = """async () => {
    const calls = [];
    const original = window.fetch;
    window.fetch = (path, options) => path.startsWith("/history")
        ? new Promise((resolve) => calls.push(resolve)) : original(path, options);
    const answer = (number, body, status = 200) => calls[number](new Response(JSON.stringify(body), { status }));
    try {
        const { History } = await import("/page/history.js");
        const history = new History();
        %s
    } finally {
        window.fetch = original;
    }
}"""


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Run two replicas of one model behind a router, which also knows twelve workers of another that do not exist."""
    folder = tmp_path_factory.mktemp("page-fleet")
    with ExitStack() as stack:
        replicas = [stack.enter_context(ReplicaProcess(folder / f"w{number}")) for number in range(2)]
        flags = [*worker_flags(replica.endpoints for replica in replicas), "--grafana-url", GRAFANA]
        started = stack.enter_context(RouterProcess(folder / "router", flags))
        for number in range(12):
            url = f"http://127.0.0.1:{number + 1}"
            started.request("POST", "/register", {"worker_id": f"gone-{number}", "model": "other", "url": url})
        until(lambda: len(states(started, "live")) == 2 and len(states(started, "down")) == 12, "the fleet is settled")
        model = replicas[0].endpoints["model"]
        for number in range(8):
            started.request(
                "POST", "/v1/completions", {"model": model, "prompt": [7] * (200 + number), "max_tokens": 2}
            )
        yield started


def states(router: RouterProcess, state: str) -> list[str]:
    return [row["worker_id"] for row in router.request("GET", "/workers")["workers"] if row["state"] == state]


def ids(page: Page) -> list[str]:
    return page.locator(f"{ROWS} button").all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_what_opens_fits_its_window_and_axe_finds_nothing(
    chromium: Browser, router: RouterProcess, width: int, scheme: str
) -> None:
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with closing(BrowserPage(chromium, router.port, **options)) as tab:
        page = tab.open("fleet")
        page.click(f"{ROWS} button >> nth=0")
        page.click("text=Heat map as a table")
        page.wait_for_selector("#fleet-heat tbody tr")
        page.click("#menu summary")
        assert page.get_attribute("#links a:text('Grafana')", "href") == GRAFANA
        assert page.get_attribute("#links a:text('API')", "href") == "/docs"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('header').offsetHeight") < 110, "at most two rows"
        assert not violations(page)
        page.click("text=Keyboard shortcuts")
        assert not violations(page)


def test_trouble_comes_first_and_columns_sort(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("fleet")
    expect(page.locator(ROWS)).to_have_count(14)
    live = states(router, "live")
    assert set(ids(page)[-2:]) == set(live), "those that are fine come last"
    page.click("th button:text('Worker')")
    expect(page.locator("th[aria-sort=ascending]")).to_have_text(re.compile("Worker"))
    gone = [f"gone-{number}" for number in range(12)]
    assert ids(page) == [*gone, *live], "10 comes after 9"
    page.click("th button:text('Worker')")
    expect(page.locator("th[aria-sort=descending]")).to_have_text(re.compile("Worker"))
    assert ids(page) == [*live[::-1], *gone[::-1]]
    page.click("th button:text('Hit share')")
    page.wait_for_selector("th[aria-sort]:has-text('Hit share')")
    assert set(ids(page)[:2]) & set(live), "workers without an answer come last"


def test_the_filter_and_a_link_choose_workers(tab: BrowserPage, router: RouterProcess) -> None:
    page = tab.open("fleet")
    page.fill("input[type=search]", "gone-1")
    expect(page.locator(ROWS)).to_have_count(3)
    page.fill("input[type=search]", "nothing like it")
    page.wait_for_selector("text=No worker matches.")
    page.goto(f"{tab.address}#fleet/trouble")
    expect(page.locator(ROWS)).to_have_count(12)
    page.goto(f"{tab.address}#fleet/gone-3")
    expect(page.locator("#fleet-workers .details")).to_contain_text("http://127.0.0.1:4")
    assert page.locator("#fleet-workers .details").count() == 1


@pytest.mark.parametrize("view", ["fleet", "doctor", "decisions"])
def test_an_address_that_is_not_encoded_is_taken_as_it_is(tab: BrowserPage, view: str) -> None:
    page = tab.page
    page.goto(f"{tab.address}#{view}/%")
    page.wait_for_selector(f"nav a[href='#{view}'][aria-current]")
    expect(page.locator("#view h2")).to_have_text(view.capitalize())
    expect(page.locator("#verdict")).to_have_text(re.compile("degraded|ready"))
    if view == "fleet":
        assert page.input_value("input[type=search]") == "%"
    # An unknown decision is a 404, which the browser reports itself.
    tab.problems = [problem for problem in tab.problems if "404" not in problem]


def test_the_heat_map_has_modes_and_the_same_values_as_text(tab: BrowserPage) -> None:
    page = tab.open("fleet")
    for mode, words in (
        ("load", "Requests in flight"),
        ("share", "Prompt tokens reused"),
        ("lag", "Delay"),
        ("fill", "Blocks held"),
    ):
        page.check(f"input[name=mode][value={mode}]")
        expect(page.locator("#fleet-heat canvas")).to_have_attribute("aria-label", re.compile(words))
    page.click("text=Heat map as a table")
    expect(page.locator("#fleet-heat tbody tr")).to_have_count(14)
    page.hover("#fleet-heat canvas", position={"x": 45, "y": 10})
    expect(page.locator(".tip strong")).to_have_text(ids(page)[0])
    page.click("#fleet-heat canvas", position={"x": 45, "y": 10})
    expect(page.locator("#fleet-workers .details")).to_have_count(1)


def test_one_model_is_chosen_for_all_views_and_kept(tab: BrowserPage) -> None:
    page = tab.open("fleet")
    expect(page.locator(ROWS)).to_have_count(14)
    page.select_option("#model", "other")
    expect(page.locator(ROWS)).to_have_count(12)
    page = tab.open("overview")
    page.wait_for_selector("a.tile:has-text('of 12 workers')")
    page.reload()
    page.wait_for_selector("a.tile:has-text('of 12 workers')")
    page.select_option("#model", "")
    page.wait_for_selector("a.tile:has-text('of 14 workers')")


def test_the_overview_leads_to_what_explains_it(tab: BrowserPage) -> None:
    page = tab.open("overview")
    page.click("a.tile:has-text('Workers in trouble')")
    page.wait_for_selector("nav a[href='#fleet'][aria-current]")
    expect(page.locator(ROWS)).to_have_count(12)
    page = tab.open("overview")
    page.click("a.tile:has-text('Prompt tokens reused')")
    page.wait_for_selector("nav a[href='#reuse'][aria-current]")


def test_the_status_is_that_of_the_fleet(chromium: Browser, tmp_path: Path) -> None:
    with ExitStack() as stack:
        router = stack.enter_context(RouterProcess(tmp_path / "router"))
        at = stack.enter_context(ReplicaProcess(tmp_path / "w0")).endpoints
        tab = stack.enter_context(closing(BrowserPage(chromium, router.port)))
        page = tab.open("overview")
        expect(page.locator("#verdict")).to_have_text("no worker")
        page.wait_for_selector("text=No worker is registered")
        page = tab.open("prompt")
        page.wait_for_selector("text=No worker is registered")
        assert page.is_disabled("#prompt-ask"), "there is no model to ask about"
        body = {"worker_id": "w0", "model": at["model"], "url": at["url"]}
        router.request(
            "POST", "/register", body | {"kv_events_endpoint": at["events"], "replay_endpoint": at["replay"]}
        )
        expect(page.locator("#verdict")).to_have_text("ready, 1 of 1 worker")
        router.request("POST", "/register", {"worker_id": "w1", "model": at["model"], "url": "http://127.0.0.1:9"})
        expect(page.locator("#verdict")).to_have_text(re.compile(r"degraded: \d"))
        assert page.get_attribute("#verdict", "href") == "#doctor"


def test_keys_move_in_lists_and_open_views_but_not_while_one_writes(tab: BrowserPage) -> None:
    page = tab.open("fleet")
    page.wait_for_selector(f"{ROWS} >> nth=13")
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = "document.activeElement.closest('[data-row]')?.dataset.row"
    assert page.evaluate(focused) == page.locator(ROWS).nth(1).get_attribute("data-row")
    page.keyboard.press("k")
    assert page.evaluate(focused) == page.locator(ROWS).nth(0).get_attribute("data-row")
    page.keyboard.press("Enter")
    page.wait_for_selector("#fleet-workers .details")
    page.keyboard.press("Escape")
    expect(page.locator("#fleet-workers .details")).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("j1?")
    assert page.input_value("input[type=search]") == "j1?" and page.locator("dialog").count() == 0
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog:has-text('Keyboard shortcuts')")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("3")
    page.wait_for_selector("nav a[href='#reuse'][aria-current]")


def test_a_thousand_workers_are_shown_in_pages(tab: BrowserPage, router: RouterProcess) -> None:
    known = router.request("GET", "/workers")["workers"]
    many = [known[number % len(known)] | {"worker_id": f"worker-{number}"} for number in range(1_000)]

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="application/json", body=json.dumps({"workers": many}))

    tab.page.route("**/workers", answer)
    page = tab.open("fleet")
    page.wait_for_selector(f"text=1 to {PAGE_ROWS} of 1,000")
    assert page.locator(ROWS).count() == PAGE_ROWS
    assert page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
    first = ids(page)
    page.click("text=Next")
    page.wait_for_selector(f"text={PAGE_ROWS + 1} to {2 * PAGE_ROWS} of 1,000")
    assert not set(first) & set(ids(page))
    page.fill("input[type=search]", "worker-99")
    expect(page.locator(ROWS)).to_have_count(11)
    tab.page.unroute("**/workers")


def test_history_survives_a_reload(tab: BrowserPage) -> None:
    page = tab.open("overview")
    answered = page.locator("a.tile:has-text('Requests per second')")
    expect(answered).to_contain_text("8 in the last hour")
    page.click("button:text('24 hours')")
    expect(page.locator("button:text('24 hours')")).to_have_attribute("aria-pressed", "true")
    page.reload()
    expect(answered).to_contain_text("8 in the last hour")
    expect(page.locator("button:text('24 hours')")).to_have_attribute("aria-pressed", "true")


def test_a_late_answer_for_the_former_model_is_not_shown(tab: BrowserPage) -> None:
    page = tab.open("events")
    shown = page.evaluate(
        HISTORY_SCRIPT
        % """
        const all = history.look(null, "");
        history.forget();
        const chosen = history.look(null, "gemma");
        answer(1, { of: "gemma" });
        await chosen;
        answer(0, { of: "all" });
        await all;
        return history.hour.of;
    """
    )
    assert shown == "gemma"


def test_a_history_that_one_router_lacks_is_looked_for_again_after_a_minute(tab: BrowserPage) -> None:
    page = tab.open("events")
    seen = page.evaluate(
        HISTORY_SCRIPT
        % """
        const seen = [];
        const clock = performance.now.bind(performance);
        try {
            const first = history.look(null, "");
            answer(0, {}, 404);
            await first;
            await history.look(null, "");
            seen.push([history.isKept, calls.length]);
            performance.now = () => clock() + 61_000;
            const later = history.look(null, "");
            answer(1, { of: "all" });
            await later;
            seen.push([history.isKept, calls.length, history.hour.of]);
        } finally {
            delete performance.now;
        }
        return seen;
    """
    )
    assert seen == [[False, 1], [True, 2, "all"]]


def test_figures_of_the_last_minute_are_those_that_the_router_states(tab: BrowserPage) -> None:
    page = tab.open("events")
    script = """
        const series = Object.fromEntries(["requests", "ttft_p50_s", "ttft_p95_s"].map((name) => [name, [1, 2]]));
        const lines = { time_s: [100, 105], step_s: 5, series, totals: { requests: 9 } };
        history.hour = { ...lines, last_minute: { requests: 7, ttft_p50_s: 0.5 } };
        const stated = history.now.minute;
        // A router of the former release states none, and percentiles of steps cannot be added.
        history.hour = lines;
        const added = history.now.minute;
        return [stated.requests, stated.ttft_p50_s, stated.length_s, added.requests, added.ttft_p50_s ?? null];
    """
    assert page.evaluate(HISTORY_SCRIPT % script) == [7, 0.5, 60, 3, None]


@pytest.mark.parametrize("model", ["", "m"])
def test_charts_from_counters_count_failures_as_the_history_does(tab: BrowserPage, model: str) -> None:
    page = tab.open("events")
    # Only answers are counted by model. A counted answer is complete, so there are fewer outcomes.
    outcomes = ANSWER_OUTCOMES if model else (*ANSWER_OUTCOMES, "refused", "unreachable", "cut", "client_gone", "bug")
    names = ("proxy_answers",) if model else ("proxy_requests", "gateway_requests")
    page_of = "\n".join(
        f'kvrouter_{name}_total{{model="m",outcome="{outcome}"}} %d'
        for name in names
        for outcome in (*outcomes, "passed")
    )
    script = f"""
        const {{ samples }} = await import("/page/api.js");
        const {{ HISTORY_METRICS }} = await import("/page/history.js");
        history.isKept = false;
        for (const value of [3, 4]) {{
            const text = {json.dumps(page_of)}.replaceAll("%d", value);
            history.observe(100 + value, samples(text, HISTORY_METRICS), {json.dumps(model)});
        }}
        const {{ requests, failed }} = history.now.minute;
        return [requests, failed];
    """
    failed = FAILED_OUTCOMES & set(outcomes)
    shown = page.evaluate(HISTORY_SCRIPT.replace("%s", script))
    assert shown == [len(names) * len(outcomes), len(names) * len(failed)]


def test_a_value_without_neighbours_is_drawn_as_a_point(tab: BrowserPage) -> None:
    page = tab.open("events")
    script = """async (column) => {
        const { Chart } = await import("/page/chart.js");
        const chart = new Chart("t", "u", [["s", "--held"]]);
        chart.set({ time_s: column.map((_, i) => i), from_s: 0, to_s: 9 }, [column]);
        return chart.lonely(1);
    }"""
    assert page.evaluate(script, [1, None, None, 2, None, 0, 1, None, 3]) == [0, 3, 8]


def test_the_heat_map_names_the_groups_of_each_model(tab: BrowserPage, router: RouterProcess) -> None:
    known = router.request("GET", "/workers")["workers"][0]

    def worker(model: str, *kinds: str) -> dict[str, object]:
        groups = [{"group_idx": number, "kind": kind} for number, kind in enumerate(kinds)]
        residency = {f"g{number}:GPU": 1 for number in range(len(kinds))}
        return known | {"worker_id": model, "model": model, "catalog": {"groups": groups}, "residency": residency}

    workers = [worker("gemma", "full_attention", "sliding_window"), worker("jamba", "mamba", "full_attention", "mamba")]
    body = json.dumps({"workers": workers})
    tab.page.route("**/workers", lambda route: route.fulfill(content_type="application/json", body=body))
    page = tab.open("fleet")
    expect(page.locator(".heat-notes")).to_contain_text(
        "From the top: gemma: all, g0 full attention, g1 sliding window; jamba: all, g0 mamba, g1 full attention, g2 mamba."
    )
    page.select_option("#model", "gemma")
    expect(page.locator(".heat-notes")).to_contain_text("From the top: all, g0 full attention, g1 sliding window.")
    page.select_option("#model", "")
    page.unroute_all(behavior="ignoreErrors")


def test_a_prompt_that_many_workers_could_take_shows_a_few_at_first(tab: BrowserPage, router: RouterProcess) -> None:
    def many(route: Route) -> None:
        body = route.fetch().json()
        instance = next(iter(body["instances"].values()))
        body["instances"] = {f"w{number}": instance for number in range(100)}
        route.fulfill(content_type="application/json", body=json.dumps(body))

    workers = router.request("GET", "/workers")["workers"]
    tab.page.route("**/query", many)
    page = tab.open("prompt")
    page.select_option("#prompt-models", next(row["model"] for row in workers if row["state"] == "live"))
    page.check("input[value=tokens]")
    page.fill("textarea", "7, 7, 7")
    page.click("#prompt-ask")
    expect(page.locator("[data-worker]")).to_have_count(8)
    page.click("text=Show 50 more of 92 workers")
    expect(page.locator("[data-worker]")).to_have_count(58)
    page.unroute_all(behavior="ignoreErrors")


def test_answers_of_the_former_release_are_shown(tab: BrowserPage) -> None:
    def former(route: Route) -> None:
        body = route.fetch().json()
        for name in ("age_s", "kept", "searched"):
            body.pop(name, None)
        route.fulfill(status=200, content_type="application/json", body=json.dumps(body))

    for path in ("diagnosis", "decisions"):
        tab.page.route(f"**/{path}?*", former)
    page = tab.open("doctor")
    expect(page.locator("#doctor-now [role=status]")).to_have_text(re.compile(r"\d checks of \d+ workers, \d+ s ago"))
    page.goto(f"{tab.address}#decisions?only=failed")
    expect(page.locator("#decisions-list tbody tr, #decisions-list .quiet").first).to_be_visible()
    page.unroute_all(behavior="ignoreErrors")


def test_a_router_without_history_gets_charts_from_its_counters(chromium: Browser, router: RouterProcess) -> None:
    def missing(route: Route) -> None:
        route.fulfill(status=404, content_type="application/json", body='{"error": {"message": "no such path"}}')

    tab = BrowserPage(chromium, router.port)
    for path in ("history", "savings"):
        tab.page.route(f"**/{path}?*", missing)
    page = tab.open("reuse")
    page.wait_for_selector("text=charts begin when you opened this page")
    expect(page.locator(".chart >> nth=0")).to_have_attribute("aria-label", re.compile(r"now predicted \d"))
    # The browser reports each 404 itself.
    assert all("404" in problem for problem in tab.problems), tab.problems
    tab.problems.clear()
    tab.close()
