// SPDX-License-Identifier: Apache-2.0
// Predicted beside delivered reuse, and what was achieved beside what could have been.

import { total } from "./api.js";
import { Chart } from "./chart.js";
import { el, show, table, tiles } from "./dom.js";
import { brief, count, percent, route, seconds } from "./words.js";

const PREDICTED = "kvrouter_predicted_cached_tokens_total";
const DELIVERED = "kvrouter_delivered_cached_tokens_total";
const OVER = "kvrouter_over_credit_tokens_total";
const UNDER = "kvrouter_under_credit_tokens_total";
const ACHIEVABLE = "kvrouter_achievable_hit_tokens_total";
const CHOSEN = "kvrouter_chosen_hit_tokens_total";
const LOST = "kvrouter_lost_hit_tokens_total";
const JUDGED = "kvrouter_predictions_total";
const UNJUDGED = "kvrouter_predictions_unjudged_total";
const EXPECTED = "kvrouter_expected_cached_tokens_total";
const PREDICTION_ERRORS = "kvrouter_prediction_error_tokens_bucket";
const EXPECTATION_ERRORS = "kvrouter_expectation_error_tokens_bucket";

export const REUSE_METRICS = [
  PREDICTED, EXPECTED, DELIVERED, OVER, UNDER, ACHIEVABLE, CHOSEN, LOST, JUDGED, UNJUDGED, PREDICTION_ERRORS, EXPECTATION_ERRORS,
];
const LINES = [PREDICTED, DELIVERED, ACHIEVABLE, CHOSEN];

/** Rates of the counters, from one look at the metrics to the next; kept while the page is open. */
export class ReuseHistory {
  constructor() {
    this.before = null;
    this.proof = new Chart("Reuse as predicted and as delivered", "tokens/s", [["predicted", "--held"], ["delivered", "--held-cpu"]]);
    this.choice = new Chart("Reuse that was possible and that was chosen", "tokens/s", [["possible", "--part-queued"], ["chosen", "--held"]]);
  }

  add(time_s, metrics) {
    const totals = LINES.map((name) => total(metrics.get(name)));
    if (this.before) {
      const passed_s = time_s - this.before.time_s;
      // A counter that went back belongs to a router that was started again.
      const rates = totals.map((value, i) => Math.max(0, value - this.before.totals[i]) / passed_s);
      this.proof.add(time_s, rates.slice(0, 2));
      this.choice.add(time_s, rates.slice(2));
    }
    this.before = { time_s, totals };
  }
}

function savedSeconds(metrics, loads) {
  let saved_s = 0;
  let unknown = 0;
  const rates = new Map(loads.flatMap((model) => model.loads.map((one) => [`${model.model_name}/${route(one)}`, one.prefill_rate])));
  for (const [labels, value] of metrics.get(DELIVERED)) {
    const rate = rates.get(`${labels.model}/${labels.worker}`);
    if (rate) saved_s += value / rate;
    else unknown += value;
  }
  return { saved_s, unknown };
}

// Reasons of docs/explanation/choosing.md.
const LOST_WORDS = {
  exclusion: "the client excluded it, or pinned another",
  state: "it was down, draining, or behind an open breaker",
  load: "it was saturated, slow, or had too much to do",
  affinity: "the session, or a prompt that begins alike, was elsewhere",
  tier: "loading from its lower tier takes longer than computing",
};

// How much more was reused than said: the upper bounds of the buckets that belong together.
const BANDS = [
  ["Less", "-1.0"],
  ["Exactly as much", "0.0"],
  ["Up to 64 tokens more", "64.0"],
  ["Up to 1,024 tokens more", "1024.0"],
  ["Over 1,024 tokens more", "+Inf"],
];

/** Answers of a histogram of differences, a number for each band. */
function bands(list) {
  const reached = BANDS.map(([, bound]) => total(list, (labels) => labels.le === bound));
  return reached.map((value, i) => value - (i ? reached[i - 1] : 0));
}

function update({ state }) {
  const { metrics, loads } = state;
  if (!metrics) return;
  const sum = (name) => total(metrics.get(name));
  const { saved_s, unknown } = savedSeconds(metrics, loads);
  const by = (name, label) => {
    const found = new Map();
    for (const [labels, value] of metrics.get(name)) {
      const one = labels[label] ?? "";
      found.set(one, (found.get(one) ?? 0) + value);
    }
    return found;
  };
  const judged = total(metrics.get(JUDGED), (labels) => labels.outcome !== "untold");
  const exact = total(metrics.get(JUDGED), (labels) => labels.outcome === "exact");
  show(document.getElementById("reuse-now"), tiles([
    ["Prompt tokens reused", brief(sum(DELIVERED)), "as engines report"],
    ["Predicted for the same answers", brief(sum(PREDICTED))],
    ["Expected with prompts ahead", brief(sum(EXPECTED))],
    ["Predictions exact", percent(exact, judged), `of ${count(judged)}`],
    ["Of the reuse possible", percent(sum(CHOSEN), sum(ACHIEVABLE)), "chosen"],
    ["Prefill saved", saved_s || !unknown ? `≈ ${seconds(saved_s)}` : "–", unknown ? `${brief(unknown)} tokens at speeds not measured yet` : "at measured speeds"],
  ]));
  const lost = [...by(LOST, "reason")].filter(([, value]) => value).sort((a, b) => b[1] - a[1]);
  show(document.getElementById("reuse-lost"), table({
    caption: "Tokens that another worker held, by why it was not chosen",
    columns: [{ name: "Reason" }, { name: "Tokens", number: true }],
    keys: lost.map(([reason]) => reason),
    rows: lost.map(([reason, value]) => [LOST_WORDS[reason] ?? reason.replaceAll("_", " "), count(value)]),
    empty: "None: every prompt went to a worker that held the most of it.",
  }));
  const predictions = bands(metrics.get(PREDICTION_ERRORS));
  const expectations = bands(metrics.get(EXPECTATION_ERRORS));
  show(document.getElementById("reuse-errors"), table({
    caption: "Answers, by what was reused beside what was said before",
    columns: [{ name: "Reused" }, { name: "than predicted", number: true }, { name: "than expected", number: true }],
    keys: judged ? BANDS.map(([name]) => name) : [],
    rows: judged ? BANDS.map(([name], i) => [name, percent(predictions[i], judged), percent(expectations[i], judged)]) : [],
    empty: "No answer passed this router yet whose reuse is known.",
  }));
  const delivered = by(DELIVERED, "worker");
  const workers = [...by(PREDICTED, "worker")].sort();
  const over = by(OVER, "worker");
  const under = by(UNDER, "worker");
  show(document.getElementById("reuse-workers"), table({
    caption: "Reuse by worker, of answers where prediction and report are known",
    columns: [{ name: "Worker" }, ...["Predicted", "Delivered", "Too much", "Too little"].map((name) => ({ name, number: true }))],
    keys: workers.map(([worker]) => worker),
    rows: workers.map(([worker, value]) =>
      [worker, count(value), count(delivered.get(worker) ?? 0), count(over.get(worker) ?? 0), count(under.get(worker) ?? 0)]),
    empty: "No answer passed this router yet whose reuse is known.",
  }));
  const unjudged = [...by(UNJUDGED, "reason")].filter(([, value]) => value);
  show(document.getElementById("reuse-untold"), unjudged.length ? el("p", { class: "quiet", text:
    `Not judged: ${unjudged.map(([reason, value]) => `${count(value)} ${reason.replaceAll("_", " ")}`).join(", ")}.` }) : null);
}

export const reuse = {
  id: "reuse",
  title: "Reuse",
  mount(root, { state }) {
    const { proof, choice } = state.reuse;
    root.append(el("h2", { text: "Reuse" }),
      el("p", { class: "quiet", text: "Since the router started; lines since this page was opened." }),
      el("div", { id: "reuse-now" }),
      el("div", { class: "columns" }, [proof, choice].map((chart) => el("section", { class: "panel" }, el("h3", { text: chart.title }), chart.node))),
      el("div", { class: "columns" },
        el("section", { class: "panel" }, el("h3", { text: "Requests beside each other" }), el("div", { id: "reuse-errors" }),
          el("p", { class: "quiet", text: "Predicted: what the worker held when it was chosen. Expected: with what prompts ahead of it leave." })),
        el("section", { class: "panel" }, el("h3", { text: "Reuse that was not taken" }), el("div", { id: "reuse-lost" })),
        el("section", { class: "panel" }, el("h3", { text: "Workers" }), el("div", { id: "reuse-workers" }), el("div", { id: "reuse-untold" }))));
    proof.mount();
    choice.mount();
    this.charts = [proof, choice];
  },
  unmount() {
    this.charts.forEach((chart) => chart.unmount());
  },
  update,
};
