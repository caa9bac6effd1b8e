// SPDX-License-Identifier: Apache-2.0
// The figures that an operator looks for first: traffic, reuse, time to first token, failures, and workers in trouble.

import { Chart } from "./chart.js";
import { changes, el, pill, show, table } from "./dom.js";
import { drawRanges, rangePicker } from "./ranges.js";
import { brief, count, counted, middle, percent, rate, seconds, tone } from "./words.js";
import { BROKEN, NO_WORKER, inTrouble, workerRows } from "./workers.js";

const MOST_TROUBLED = 5;
// Shares of failed requests from which the tile is a warning and an error: more than clients with invalid requests cause.
const MANY_FAILED = 0.01;
const MOST_FAILED = 0.05;
const CHART = { height: 150 };

const charts = {
  requests: new Chart("Requests", "per second", [["all", "--held"], ["failed", "--failed"]], { ...CHART, write: (value) => rate(value ?? 0), least: 0.1 }),
  reused: new Chart("Prompt tokens reused", "", [["reused", "--held-cpu"]], { ...CHART, write: (value) => (value === null ? "–" : `${Math.round(value)} %`), least: 100 / 1.1 }),
  first: new Chart("First token", "", [["p95", "--part-queued"], ["p50", "--held"]], { ...CHART, write: seconds, least: 0.01 }),
  saved: new Chart("Prefill saved", "tokens per second", [["saved", "--held"]], CHART),
};

const quotient = (part, all, factor = 1) => (all ? (factor * part) / all : null);

/** Leaves out zeros, except those beside another value, so that no line of failures is drawn where there are none. */
const withoutZeros = (column) => column.map((value, i) => (value || column[i - 1] || column[i + 1] ? value : null));

/** Draws the charts from the sums of each step. */
function drawCharts({ time_s, from_s, to_s, step_s, series }) {
  const when = { time_s, from_s, to_s };
  const perSecond = (column) => column.map((value) => (value === null ? null : value / step_s));
  charts.requests.set(when, [perSecond(series.requests), withoutZeros(perSecond(series.failed))]);
  charts.reused.set(when, [series.prompt_tokens.map((value, i) => quotient(series.delivered_tokens[i], value, 100))]);
  charts.first.set(when, [series.ttft_p95_s, series.ttft_p50_s]);
  charts.saved.set(when, [perSecond(series.delivered_tokens)]);
}

const tile = (view, name, value, more, worse = "") => el("li", { "data-key": name }, el("a", { class: `tile ${worse}`, href: `#${view}` },
  el("span", { class: "name", text: name }), el("strong", { text: value }), el("span", { class: "more", text: more })));

function tiles(state) {
  const { minute, hour } = state.history.now;
  const rows = workerRows(state);
  const troubled = inTrouble(rows);
  const isBroken = troubled.some((row) => row.trouble === BROKEN);
  const saved = hour.delivered_tokens;
  const inHour = (text) => (hour.requests ? `${text} in the last hour` : "No request in the last hour.");
  return el("ul", { class: "tiles" },
    tile("decisions", "Requests per second", rate(quotient(minute.requests, minute.length_s)), inHour(count(hour.requests))),
    tile("reuse", "Prompt tokens reused", percent(minute.delivered_tokens, minute.prompt_tokens), inHour(percent(hour.delivered_tokens, hour.prompt_tokens))),
    tile("fleet", "First token, p50", seconds(minute.ttft_p50_s), hour.requests ? `p95 ${seconds(minute.ttft_p95_s)}. Last hour: ${seconds(hour.ttft_p50_s)}, p95 ${seconds(hour.ttft_p95_s)}` : inHour("")),
    tile("decisions?only=failed", "Requests failed", percent(minute.failed, minute.requests), inHour(percent(hour.failed, hour.requests)), urgency(quotient(minute.failed, minute.requests))),
    tile("reuse", "Prefill saved, last hour", `≈ ${brief(saved)}`, `tokens of prefill${hour.saved_s ? `, ${seconds(hour.saved_s)} of engine time` : ""}`),
    tile("fleet/trouble", "Workers in trouble", count(troubled.length), `of ${counted(rows.length, "worker")}`, isBroken ? "bad" : troubled.length ? "warn" : ""));
}

const urgency = (share) => (share >= MOST_FAILED ? "bad" : share >= MANY_FAILED ? "warn" : "");

function troubles(state) {
  if (state.health && !state.workers.length) return el("p", { class: "notice warning", "data-key": "none", text: NO_WORKER });
  const troubled = inTrouble(workerRows(state)).sort((a, b) => b.trouble - a.trouble);
  if (!troubled.length) return null;
  const more = troubled.length - MOST_TROUBLED;
  return el("section", { class: "panel", "aria-label": "Workers in trouble", "data-key": "troubles" },
    el("h3", { text: "Workers in trouble" }),
    el("ul", { class: "rows" }, troubled.slice(0, MOST_TROUBLED).map((row) => el("li", { "data-row": true, "data-key": row.key },
      el("a", { href: `#fleet/${encodeURIComponent(row.id)}`, title: row.id, text: middle(row.id) }), " ",
      pill(row.worker.state.replaceAll("_", " "), tone(row.worker.state)), " ", el("span", { text: row.reasons[0] ?? "" })))),
    more > 0 ? el("p", {}, el("a", { href: "#fleet/trouble", text: `${count(more)} more` })) : null);
}

const SUMS = ["requests", "prompt_tokens", "reused_tokens", "round_robin_tokens", "saved_s"];
const SAVED_COLUMNS = ["Requests", "Prompt tokens", "Not computed", "With round robin", "Engine time"].map((name) => ({ name, number: true }));

const summed = (days) => Object.fromEntries(SUMS.map((name) => [name, days.reduce((sum, day) => sum + day[name], 0)]));

const share = (tokens, sums) => `${brief(tokens)} (${percent(tokens, sums.prompt_tokens)})`;

const cells = (sums) => [brief(sums.requests), brief(sums.prompt_tokens), share(sums.reused_tokens, sums), share(sums.round_robin_tokens, sums), seconds(sums.saved_s)];

const modelName = (name) => el("span", { title: name, text: middle(name, 40) });

/** Returns a panel with the savings by day, and by model if there are several. */
function savings({ savings: known }) {
  if (!known || known.isMissing) return null;
  const { days } = known;
  const all = summed(days);
  const models = [...new Set(days.map((day) => day.model))].sort();
  const dates = [...new Set(days.map((day) => day.day))].sort().reverse();
  const isMixed = models.length > 1;
  const byDay = table({
    caption: "By day, the newest first", cards: true, columns: [{ name: "Day" }, ...SAVED_COLUMNS], keys: dates,
    rows: dates.map((date) => [date, ...cells(summed(days.filter((day) => day.day === date)))]), empty: "No prompt yet.",
  });
  const byModel = isMixed ? table({
    caption: "By model", cards: true, columns: [{ name: "Model" }, ...SAVED_COLUMNS], keys: models,
    rows: models.map((name) => [modelName(name), ...cells(summed(days.filter((day) => day.model === name)))]),
  }) : null;
  const byBoth = isMixed ? el("details", {}, el("summary", { text: "By day and model" }), table({
    caption: "By day and model", cards: true, columns: [{ name: "Day" }, { name: "Model" }, ...SAVED_COLUMNS],
    keys: days.map((day) => `${day.day}/${day.model}`), rows: days.map((day) => [day.day, modelName(day.model), ...cells(day)]),
  })) : null;
  return el("section", { class: "panel", "aria-label": "Savings", "data-key": "savings" },
    el("h3", { text: "Saved in the last 7 days" }),
    days.length ? el("p", {}, el("strong", { text: `${brief(all.reused_tokens)} prompt tokens` }), ` were not computed, about ${seconds(all.saved_s)} of engine time at measured speeds. By an estimate, the same prompts sent round robin would have reused ${brief(all.round_robin_tokens)}.`) : null,
    byModel, byDay, byBoth);
}

let isChanged = changes();

function update({ state }) {
  const { history } = state;
  if (!isChanged(state.workers, state.loads, state.health, state.model, state.savings, history.version)) return;
  drawCharts(state.history.shown);
  drawRanges("overview-ranges", state);
  show(document.getElementById("overview-now"), tiles(state), troubles(state));
  show(document.getElementById("overview-savings"), savings(state));
}

export const overview = {
  id: "overview",
  title: "Overview",
  mount(root, app) {
    root.append(el("div", { class: "head" }, el("h2", { text: "Overview" }), rangePicker(app, "overview-ranges")),
      el("div", { id: "overview-now" }),
      el("div", { class: "columns" }, Object.values(charts).map((chart) => chart.panel())),
      el("div", { id: "overview-savings" }));
    for (const chart of Object.values(charts)) chart.mount();
    isChanged = changes();
  },
  unmount() {
    for (const chart of Object.values(charts)) chart.unmount();
  },
  update,
};
