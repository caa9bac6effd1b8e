// SPDX-License-Identifier: Apache-2.0
// The history of the traffic, which the router keeps (GET /history). A router that keeps none answers 404; then lines are
// computed from its counters, and begin when the page is opened.

import { get, total } from "./api.js";

const RANGE = "kvrouter-range";
export const RANGES = [
  { name: "15m", title: "15 minutes", length_s: 900 },
  { name: "1h", title: "1 hour", length_s: 3600 },
  { name: "24h", title: "24 hours", length_s: 86_400 },
];
// How long "now" is in a figure: long enough that a single request does not change it much.
const NOW_S = 60;
// How often the day's history is read. Its steps are a minute long.
const DAY_REST_MS = 30_000;
const KEPT = 1800;
// Behind a balancer, one router may keep a history while another, of the former release, keeps none.
const MISSING_REST_MS = 60_000;

const NAMES = ["requests", "failed", "prompt_tokens", "delivered_tokens", "predicted_tokens", "possible_tokens", "chosen_tokens",
  "saved_s", "ttft_p50_s", "ttft_p95_s"];
const REQUESTS = ["kvrouter_proxy_requests_total", "kvrouter_gateway_requests_total"];
const ANSWERS = "kvrouter_proxy_answers_total";
const COUNTERS = {
  predicted_tokens: "kvrouter_predicted_cached_tokens_total", delivered_tokens: "kvrouter_delivered_cached_tokens_total",
  possible_tokens: "kvrouter_achievable_hit_tokens_total", chosen_tokens: "kvrouter_chosen_hit_tokens_total",
};
// The outcomes that the history counts as failures. It also counts refusals with a status of 500 or more, which no counter
// distinguishes from other refusals.
const FAILURES = new Set(["server_error", "cut", "unreachable", "bug"]);
export const HISTORY_METRICS = [...REQUESTS, ANSWERS, ...Object.values(COUNTERS)];

/** Returns the sums that the counters have reached. Requests are counted by model only if an engine's answer was complete. */
function reached(metrics, model) {
  const samples = (name) => metrics.get(name).filter(([labels]) => !model || labels.model === model);
  // A gateway's requests without a prompt have the outcome "passed", and are in no history.
  const requests = (model ? [ANSWERS] : REQUESTS).flatMap(samples).filter(([labels]) => labels.outcome !== "passed");
  return {
    requests: total(requests), failed: total(requests, (labels) => FAILURES.has(labels.outcome)),
    ...Object.fromEntries(Object.entries(COUNTERS).map(([name, metric]) => [name, total(samples(metric))])),
  };
}

const nothing = () => ({ time_s: [], series: Object.fromEntries(NAMES.map((name) => [name, []])), step_s: 1 });

/** The history of a router that keeps none: the differences of its counters from one look to the next. */
class OwnHistory {
  constructor() {
    this.lines = nothing();
    this.before = null;
  }

  add(time_s, metrics, model) {
    const totals = reached(metrics, model);
    if (this.before?.model === model) {
      const { time_s: times, series } = this.lines;
      times.push(time_s);
      // A counter that became smaller belongs to a router that was restarted.
      for (const name of NAMES) series[name].push(name in totals ? Math.max(0, totals[name] - this.before.totals[name]) : null);
      this.lines.step_s = time_s - this.before.time_s;
      if (times.length > KEPT) [times, ...Object.values(series)].forEach((column) => column.shift());
    } else {
      this.lines = nothing();
    }
    this.before = { time_s, totals, model };
  }
}

const sum = (column) => column.reduce((all, value) => all + (value ?? 0), 0);

/** Returns the part of the lines from a time on. */
function cut(lines, from_s) {
  let first = lines.time_s.findIndex((time_s) => time_s >= from_s);
  if (first < 0) first = lines.time_s.length;
  return {
    ...lines, time_s: lines.time_s.slice(first),
    series: Object.fromEntries(Object.entries(lines.series).map(([name, column]) => [name, column.slice(first)])),
  };
}

export class History {
  constructor() {
    this.range = sessionStorage.getItem(RANGE) ?? "15m";
    this.isKept = true;
    this.missingAt = -Infinity;
    this.own = new OwnHistory();
    this.hour = null;
    this.day = null;
    this.dayAt = -Infinity;
    // The model of the last look.
    this.model = "";
    // Changes whenever anything that is shown changes.
    this.version = 0;
  }

  choose(range) {
    this.range = range;
    sessionStorage.setItem(RANGE, range);
    this.dayAt = -Infinity;
    this.version += 1;
  }

  forget() {
    Object.assign(this, { hour: null, day: null, dayAt: -Infinity });
    this.version += 1;
  }

  async look(signal, model) {
    if (!this.isKept && performance.now() - this.missingAt < MISSING_REST_MS) return;
    this.model = model;
    const hour = await this.ask("1h", model, signal);
    // Another model was chosen meanwhile, and its answer may have come first.
    if (this.model !== model) return;
    this.hour = hour;
    if (this.range === "24h" && performance.now() - this.dayAt > DAY_REST_MS) {
      const day = await this.ask("24h", model, signal);
      if (this.model !== model) return;
      this.day = day;
      this.dayAt = performance.now();
    }
    this.version += 1;
  }

  async ask(range, model, signal) {
    try {
      const reply = await get(`/history?range=${range}${model ? `&model=${encodeURIComponent(model)}` : ""}`, signal);
      this.found();
      return reply;
    } catch (error) {
      if (error.status !== 404) throw error;
      // The 404 may mean that the model has had no request yet, so try without a model.
      if (model) await this.ask(range, "", signal);
      else Object.assign(this, { isKept: false, missingAt: performance.now() });
      return null;
    }
  }

  found() {
    if (this.isKept) return;
    this.isKept = true;
    // Its counters stand still from now on.
    this.own = new OwnHistory();
  }

  observe(time_s, metrics, model) {
    if (this.isKept) return;
    this.own.add(time_s, metrics, model);
    this.version += 1;
  }

  /** The lines of the chosen range, with its bounds. */
  get shown() {
    const { length_s } = RANGES.find((range) => range.name === this.range) ?? RANGES[0];
    const lines = (this.isKept ? (this.range === "24h" ? this.day : this.hour) : this.own.lines) ?? nothing();
    // Use the router's clock, because the browser's may differ. Each time is the beginning of a step.
    const to_s = (lines.time_s.at(-1) ?? Date.now() / 1000) + lines.step_s;
    return { ...cut(lines, to_s - length_s), from_s: to_s - length_s, to_s };
  }

  /** Sums of the chosen range. */
  get totals() {
    return sums(this.shown);
  }

  /** The sums of the last minute and of the last hour. Percentiles are known only if the router states them. */
  get now() {
    const lines = (this.isKept ? this.hour : this.own.lines) ?? nothing();
    const { last_minute: minute } = lines;
    const recent = cut(lines, (lines.time_s.at(-1) ?? 0) + lines.step_s - NOW_S);
    return { minute: minute ? { ...minute, length_s: NOW_S } : sums(recent), hour: lines.totals ?? sums(lines) };
  }
}

/** Returns the sums of lines. The percentiles of their steps cannot be added. */
function sums(lines) {
  const added = Object.entries(lines.series).filter(([name]) => !name.startsWith("ttft")).map(([name, column]) => [name, sum(column)]);
  return { ...Object.fromEntries(added), length_s: lines.time_s.length * lines.step_s };
}
