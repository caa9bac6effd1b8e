// SPDX-License-Identifier: Apache-2.0
// Predicted beside delivered reuse, and what was achieved beside what could have been.

import { total } from "./api.js";
import { Chart } from "./chart.js";
import { changes, el, show, table, tiles } from "./dom.js";
import { drawRanges, rangePicker } from "./ranges.js";
import { brief, count, middle, percent, seconds } from "./words.js";

const PREDICTED = "kvrouter_predicted_cached_tokens_total";
const DELIVERED = "kvrouter_delivered_cached_tokens_total";
const OVER = "kvrouter_over_credit_tokens_total";
const UNDER = "kvrouter_under_credit_tokens_total";
const LOST = "kvrouter_lost_hit_tokens_total";
const JUDGED = "kvrouter_predictions_total";
const UNJUDGED = "kvrouter_predictions_unjudged_total";
const EXPECTED = "kvrouter_expected_cached_tokens_total";
const PREDICTION_ERRORS = "kvrouter_prediction_error_tokens_bucket";
const EXPECTATION_ERRORS = "kvrouter_expectation_error_tokens_bucket";

export const REUSE_METRICS = [
  PREDICTED, EXPECTED, DELIVERED, OVER, UNDER, LOST, JUDGED, UNJUDGED, PREDICTION_ERRORS, EXPECTATION_ERRORS,
];

const proof = new Chart("Reuse as predicted and as delivered", "tokens/s", [["predicted", "--held"], ["delivered", "--held-cpu"]]);
const choice = new Chart("Reuse that was possible and that was chosen", "tokens/s", [["possible", "--part-queued"], ["chosen", "--held"]]);

// Reasons of docs/explanation/choosing.md.
const LOST_WORDS = {
  exclusion: "the client excluded it, or pinned another",
  state: "it was down, draining, or behind an open breaker",
  load: "it was saturated, slow, or had too much to do",
  affinity: "the session, or a prompt that begins alike, was elsewhere",
  temperature: "the choice was partly random (setting temperature)",
  policy: "a policy other than kv chose",
  memory: "what the prompt pushes out of that cache is worth more than the reuse",
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
// How many workers are shown at first. Workers with wrong predictions come first, because few people read the others.
const MOST_WORKERS = 15;
const NO_ANSWER = "No answer with a known reuse has passed through this router yet.";

let showsAll = false;
let isChanged = changes();

/** Answers of a histogram of differences, a number for each band. */
function bands(list) {
  const reached = BANDS.map(([, bound]) => total(list, (labels) => labels.le === bound));
  return reached.map((value, i) => value - (i ? reached[i - 1] : 0));
}

function drawHistory({ history }) {
  drawRanges("reuse-ranges", { history });
  const { step_s, series, ...when } = history.shown;
  const perSecond = (name) => series[name].map((value) => (value === null ? null : value / step_s));
  proof.set(when, [perSecond("predicted_tokens"), perSecond("delivered_tokens")]);
  choice.set(when, [perSecond("possible_tokens"), perSecond("chosen_tokens")]);
  const sums = history.totals;
  // A choice that is made while a step ends may be counted in only one of the two sums.
  const chosen = Math.min(sums.chosen_tokens, sums.possible_tokens);
  show(document.getElementById("reuse-now"), tiles([
    ["Prompt tokens reused", percent(sums.delivered_tokens, sums.prompt_tokens), sums.prompt_tokens ? `${brief(sums.delivered_tokens)} of ${brief(sums.prompt_tokens)}` : "No prompt yet."],
    ["Predicted for the same answers", brief(sums.predicted_tokens), "tokens"],
    ["Chosen of what was possible", percent(chosen, sums.possible_tokens), sums.possible_tokens ? `of ${brief(sums.possible_tokens)} tokens` : "No prompt yet."],
    ["Prefill saved", `≈ ${brief(sums.delivered_tokens)}`, `tokens of prefill${sums.saved_s ? `, ${seconds(sums.saved_s)} of engine time` : ""}`],
  ]));
}

function drawTotals({ metrics, model }) {
  const samples = (name) => metrics.get(name).filter(([labels]) => !model || labels.model === model);
  const by = (name, label) => {
    const found = new Map();
    for (const [labels, value] of samples(name)) {
      const key = labels[label] ?? "";
      found.set(key, (found.get(key) ?? 0) + value);
    }
    return found;
  };
  const judged = total(samples(JUDGED), (labels) => labels.outcome !== "untold");
  const exact = total(samples(JUDGED), (labels) => labels.outcome === "exact");
  show(document.getElementById("reuse-totals"), tiles([
    ["Predictions exact", exact < judged ? el("a", { href: "#decisions?only=wrong", title: "Show those that were not exact", text: percent(exact, judged) }) : percent(exact, judged),
      judged ? `of ${count(judged)}` : "No prompt yet."],
    ["Predicted", brief(total(samples(PREDICTED))), "tokens"],
    ["Expected with prompts ahead", brief(total(samples(EXPECTED))), "tokens"],
    ["Reused, as engines report", brief(total(samples(DELIVERED))), "tokens"],
  ]));
  const lost = [...by(LOST, "reason")].filter(([, value]) => value).sort((a, b) => b[1] - a[1]);
  show(document.getElementById("reuse-lost"), table({
    caption: "Tokens that another worker held, by why it was not chosen",
    columns: [{ name: "Reason" }, { name: "Tokens", number: true }],
    keys: lost.map(([reason]) => reason),
    rows: lost.map(([reason, value]) => [LOST_WORDS[reason] ?? reason.replaceAll("_", " "), count(value)]),
    empty: judged ? "None: every prompt went to a worker that held the most of it." : "No prompt yet.",
  }));
  const predictions = bands(samples(PREDICTION_ERRORS));
  const expectations = bands(samples(EXPECTATION_ERRORS));
  show(document.getElementById("reuse-errors"), table({
    caption: "Answers, by what was reused beside what was said before",
    columns: [{ name: "Reused" }, { name: "than predicted", number: true }, { name: "than expected", number: true }],
    keys: judged ? BANDS.map(([name]) => name) : [],
    rows: judged ? BANDS.map(([name], i) => [name, percent(predictions[i], judged), percent(expectations[i], judged)]) : [],
    empty: NO_ANSWER,
  }));
  drawWorkers(by);
  const unjudged = [...by(UNJUDGED, "reason")].filter(([, value]) => value);
  show(document.getElementById("reuse-untold"), unjudged.length ? el("p", { class: "quiet", text:
    `Not judged: ${unjudged.map(([reason, value]) => `${count(value)} ${reason.replaceAll("_", " ")}`).join(", ")}.` }) : null);
}

function drawWorkers(by) {
  const delivered = by(DELIVERED, "worker");
  const over = by(OVER, "worker");
  const under = by(UNDER, "worker");
  const wrong = ([worker]) => (over.get(worker) ?? 0) + (under.get(worker) ?? 0);
  const workers = [...by(PREDICTED, "worker")].sort((a, b) => wrong(b) - wrong(a) || a[0].localeCompare(b[0], "en", { numeric: true }));
  const rows = showsAll ? workers : workers.slice(0, MOST_WORKERS);
  show(document.getElementById("reuse-workers"), table({
    caption: "Tokens by worker, of answers where prediction and report are known; wrong predictions first",
    cards: true,
    columns: [{ name: "Worker" }, ...["Predicted", "Delivered", "Too much", "Too little"].map((name) => ({ name, number: true }))],
    keys: rows.map(([worker]) => worker),
    rows: rows.map(([worker, value]) => [el("a", { href: `#fleet/${encodeURIComponent(worker)}`, title: worker, text: middle(worker) }),
      count(value), count(delivered.get(worker) ?? 0), count(over.get(worker) ?? 0), count(under.get(worker) ?? 0)]),
    empty: NO_ANSWER,
  }));
  const more = document.getElementById("reuse-more");
  more.hidden = workers.length <= MOST_WORKERS;
  more.textContent = showsAll ? "Show fewer" : `Show ${count(workers.length - MOST_WORKERS)} more`;
}

export const reuse = {
  id: "reuse",
  title: "Reuse",
  mount(root, app) {
    root.append(el("div", { class: "head" }, el("h2", { text: "Reuse" }), rangePicker(app, "reuse-ranges")),
      el("div", { id: "reuse-now" }),
      el("div", { class: "columns" }, [proof, choice].map((chart) => chart.panel())),
      el("h3", { class: "part", text: "Since the router started" }), el("div", { id: "reuse-totals" }),
      el("div", { class: "columns" },
        el("section", { class: "panel" }, el("h4", { text: "Predictions and answers" }), el("div", { id: "reuse-errors" }),
          el("p", { class: "quiet note", text: "Predicted: what the worker held when it was chosen. Expected: with what prompts ahead of it leave." })),
        el("section", { class: "panel" }, el("h4", { text: "Reuse that was not taken" }), el("div", { id: "reuse-lost" }))),
      el("section", { class: "panel" }, el("h4", { text: "Workers" }), el("div", { id: "reuse-workers" }),
        el("button", { type: "button", class: "second", id: "reuse-more", on: { click: () => {
          showsAll = !showsAll;
          app.changed();
        } } }), el("div", { id: "reuse-untold" })));
    proof.mount();
    choice.mount();
    isChanged = changes();
  },
  unmount() {
    proof.unmount();
    choice.unmount();
  },
  update({ state }) {
    if (!isChanged(state.metrics, state.model, state.history.version, showsAll)) return;
    drawHistory(state);
    if (state.metrics) drawTotals(state);
  },
};
