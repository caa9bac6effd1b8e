// SPDX-License-Identifier: Apache-2.0
// The last choices as they are made, and each one's reasons.

import { get } from "./api.js";
import { costs, legend } from "./bars.js";
import { el, pill, show, table } from "./dom.js";
import { clock, count, percent, route, seconds } from "./words.js";

const PROOFS = {
  exact: "exact: the worker's events leave no doubt",
  assumed: "assumed: the worker is in doubt, or only the beginning of the prompt is known",
  approximate: "approximate: by what was sent there before",
  unknown: "unknown: the prompt's tokens were not known",
};

let explained = null;
let problem = "";

async function explain(app, id) {
  try {
    explained = await get(`/decisions/${encodeURIComponent(id)}`, app.signal);
    problem = "";
    requestAnimationFrame(() => document.getElementById("decision")?.scrollIntoView({ block: "nearest" }));
  } catch (error) {
    if (error.status === 401) app.failed(error);
    explained = null;
    problem = error.message;
  }
  app.changed();
}

function outcome(one) {
  if (!one) return "not known: the request runs, or it was a choice alone";
  const parts = [one.outcome.replaceAll("_", " ")];
  if (one.delivered_tokens !== null) {
    const expected = one.expected_tokens > one.predicted_tokens ? `, ${count(one.expected_tokens)} expected` : "";
    parts.push(`${count(one.delivered_tokens)} tokens delivered of ${count(one.predicted_tokens)} predicted${expected}`);
  }
  if (one.ttft_s !== null) parts.push(`first token after ${seconds(one.ttft_s)}`);
  if (one.e2e_s !== null) parts.push(`done after ${seconds(one.e2e_s)}`);
  return parts.join("; ");
}

function detail(one) {
  const worker = route(one);
  const facts = [
    ["Request", one.request_id || "none"], ["Selection", one.selection_id], ["Prompt", `${count(one.num_tokens)} tokens`],
    ["Why", one.reason], ["Proof", PROOFS[one.proof] ?? one.proof], ["Outcome", outcome(one.outcome)],
  ];
  if (one.lost_by) facts.push(["Given up", `${count(one.best_hit_tokens - one.overlap.longest_matched)} tokens that another worker holds, by ${one.lost_by}`]);
  if (one.prefill) facts.push(["Prefill", `${route(one.prefill)}: ${one.prefill.reason}`]);
  if (one.earlier) facts.push(["Attempts before", one.earlier.join(", ")]);
  return [
    el("h3", { text: `To ${worker}, ${clock(one.time_s)}` }),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The decision" },
      el("table", { class: "cards" }, el("tbody", {}, facts.map(([name, text]) =>
        el("tr", {}, el("th", { scope: "row", text: name }), el("td", { text })))))),
    legend(), costs(one.candidates ?? [], worker),
  ];
}

function update({ state }) {
  const rows = state.decisions.slice(0, 50);
  show(document.getElementById("decisions-list"), table({
    caption: "The last 50, the newest first",
    cards: true,
    columns: [{ name: "Time" }, { name: "Worker" }, { name: "Prompt", number: true }, { name: "Reuse", number: true }, { name: "Why" }],
    keys: rows.map((one) => one.selection_id),
    classes: rows.map((one) => (one.selection_id === explained?.selection_id ? "chosen" : null)),
    rows: rows.map((one) => {
      const predicted = one.predicted_tokens ?? one.overlap.longest_matched;
      return [
        el("button", { class: "plain time", type: "button", "data-id": one.selection_id, "aria-label": `Explain the choice of ${clock(one.time_s)}`, text: clock(one.time_s) }),
        route(one), count(one.num_tokens), percent(predicted, one.num_tokens), one.reason,
      ];
    }),
    empty: "No request was placed yet. Send one to /v1/chat/completions, or ask /select.",
  }));
  const skipped = state.log.skipped;
  show(document.getElementById("decisions-skipped"), skipped ? pill(`${count(skipped)} more not shown: a sample is sent`, "warn") : null);
  const pane = document.getElementById("decision");
  if (problem) show(pane, el("p", { class: "notice", text: problem }));
  else if (explained) show(pane, ...detail(explained));
  else show(pane, el("p", { class: "quiet", text: "Choose one to see why it went there." }));
}

const named = () => decodeURIComponent(location.hash.split("/").slice(1).join("/"));

export const decisions = {
  id: "decisions",
  title: "Decisions",
  mount(root, app) {
    root.append(el("h2", { text: "Decisions" }),
      el("form", { class: "fields", role: "search", on: { submit: (event) => {
        event.preventDefault();
        location.hash = `decisions/${encodeURIComponent(event.target.elements.id.value.trim())}`;
      } } },
      el("label", {}, el("span", { text: "x-request-id or selection id" }), el("input", { name: "id", required: true, autocomplete: "off" })),
      el("div", {}, el("button", { type: "submit", text: "Explain" }))),
      el("div", { class: "columns" },
        el("section", { class: "panel", "aria-label": "Last decisions" }, el("div", { id: "decisions-skipped" }), el("div", { id: "decisions-list", class: "log", on: { click: (event) => {
          const { id } = event.target.dataset;
          if (id) location.hash = `decisions/${encodeURIComponent(id)}`;
        } } })),
        el("section", { class: "panel", "aria-label": "Why" }, el("div", { id: "decision", "aria-live": "polite" }))));
    this.moved(app);
  },
  moved(app) {
    if (named()) explain(app, named());
  },
  update,
};
