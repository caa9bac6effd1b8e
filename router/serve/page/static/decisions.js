// SPDX-License-Identifier: Apache-2.0
// The last choices as they are made, which can be filtered and paused, and the reasons for each of them.
// The address determines what is shown: #decisions/ID?worker=NAME&only=wrong, each part of it optional.

import { get } from "./api.js";
import { costs } from "./bars.js";
import { copyButton } from "./copy.js";
import { el, pill, show, table } from "./dom.js";
import { clock, count, decoded, middle, percent, pullText, route, seconds, traceUrl } from "./words.js";

const POLL_MS = 2000;
const LISTED = 50;
// How much of a worker's id the list shows.
const ID_CHARS = 20;
// An open decision that has no outcome yet is refreshed only up to this age: its router may have lost the request.
const OPEN_S = 600;
const KINDS = [["", "All"], ["wrong", "Predicted wrong"], ["lost", "Lost reuse"], ["failed", "Failed"]];
// Why a filter leaves nothing: the ends of sentences that begin with words like "In the last 100 decisions,".
const NONE = {
  "": "there is none", wrong: "every reported reuse is the predicted one",
  lost: "every prompt went to the worker that reuses the most of it", failed: "no request failed",
};
const PROOFS = {
  exact: "exact: the worker's events leave no doubt",
  assumed: "assumed: the worker is in doubt, or only the beginning of the prompt or some prompts of the list are known",
  approximate: "approximate: by what was sent there before",
  unknown: "unknown: the prompt's tokens were not known",
};
// The tones of outcomes that are no failure of the fleet; an empty one has no pill.
const TONES = { ok: "", client_gone: "", client_error: "warn" };
const HEADING = "decision-title";

let list = null;
let loading = "";
// The path of the list that was read last, or is being read.
let read = "";
// "" while the list follows new decisions; "person" if the button paused it; "reading" while a decision is open.
let paused = "";
let decisionsBefore = 0;
let explained = null;
let problem = "";
let scrolled = 0;

/** Returns the parts of the address: {id, worker, only}. */
function place() {
  const [path, query] = location.hash.slice(1).split("?");
  const wanted = new URLSearchParams(query);
  return { id: decoded(path.split("/").slice(1).join("/")), worker: wanted.get("worker") ?? "", only: wanted.get("only") ?? "" };
}

function hashOf({ id, worker, only }) {
  const query = new URLSearchParams(Object.entries({ worker, only }).filter(([, value]) => value));
  return `#decisions${id ? `/${encodeURIComponent(id)}` : ""}${query.size ? `?${query}` : ""}`;
}

const goTo = (change) => { location.hash = hashOf({ ...place(), ...change }); };

/** Returns the path of the list for the filters of the address and the model of the header. */
function pathOf({ model }) {
  const { worker, only } = place();
  return `/decisions?${new URLSearchParams(Object.entries({ limit: LISTED, worker, only, model }).filter(([, value]) => value))}`;
}

/** Reads the list, unless it is being read already. */
async function refresh(app) {
  const path = pathOf(app.state);
  if (loading === path || !app.signal) return;
  loading = path;
  read = path;
  try {
    const reply = await get(path, app.signal);
    if (loading === path) list = reply;
  } catch (error) {
    app.failed(error);
  }
  if (loading === path) loading = "";
  app.changed();
}

async function explain(app, id) {
  try {
    const reply = await get(`/decisions/${encodeURIComponent(id)}`, app.signal);
    if (place().id !== id) return;
    explained = reply;
    problem = "";
  } catch (error) {
    if (error.name === "AbortError" || place().id !== id) return;
    if (error.status === 401) app.failed(error);
    explained = null;
    problem = error.message;
  }
  app.changed();
}

async function open(app) {
  const { id } = place();
  scrolled = document.documentElement.scrollTop;
  if (list && !paused) pause("reading", app);
  await explain(app, id);
  // The first frame draws the decision, so its title can be found in the second.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const title = document.getElementById(HEADING);
    if (!title) return;
    title.closest(".pane").scrollTop = 0;
    // In a narrow window, the decision replaces the list.
    if (document.getElementById("decisions-list").checkVisibility()) return;
    title.scrollIntoView({ block: "start" });
    title.focus({ preventScroll: true });
  }));
}

function pause(who, app) {
  paused = who;
  decisionsBefore = made(app.state.log);
  app.changed();
}

function resume(app) {
  paused = "";
  refresh(app);
  app.changed();
}

/** Returns how many decisions the stream of events has reported, including those that it skipped. */
const made = (log) => (log.counts.get("decision") ?? 0) + log.skipped;

const quoted = (text) => (/^[\w.:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function outcomeText(outcome) {
  if (!outcome) return "not known: the request runs, or it was a choice alone";
  const parts = [outcome.outcome.replaceAll("_", " ")];
  if (outcome.delivered_tokens !== null) {
    const expected = outcome.expected_tokens > outcome.predicted_tokens ? `, ${count(outcome.expected_tokens)} expected` : "";
    parts.push(outcome.predicted_tokens === null
      ? `the engine reports ${count(outcome.delivered_tokens)} tokens as reused; no prediction can be compared with that`
      : `${count(outcome.delivered_tokens)} tokens delivered of ${count(outcome.predicted_tokens)} predicted${expected}`);
  }
  if (outcome.fetched_tokens !== undefined) parts.push(`${count(outcome.fetched_tokens)} tokens fetched`);
  if (outcome.ttft_s !== null) parts.push(`first token after ${seconds(outcome.ttft_s)}`);
  if (outcome.e2e_s !== null) parts.push(`done after ${seconds(outcome.e2e_s)}`);
  return parts.join("; ");
}

function promptsText({ num_prompts: prompts = 1, answers = 1 }) {
  const parts = [];
  if (prompts > 1) parts.push(`${count(prompts)} prompts, placed together`);
  if (answers > 1) parts.push(`${count(answers)} answers${prompts > 1 ? " to each" : ""}`);
  return parts.length ? `${parts.join(", ")}: ` : "";
}

const copied = (text, label) => el("span", { class: "copied" }, el("code", { text }), copyButton(text, label));

function detail(decision, { workers, links }) {
  const worker = route(decision);
  const id = decision.request_id || decision.selection_id;
  const trace = traceUrl(links.trace_url, decision);
  const facts = [
    ["Request", decision.request_id ? copied(decision.request_id, "the request's id") : "none"],
    ["Selection", copied(decision.selection_id, "the selection's id")],
    ["Prompt", `${promptsText(decision)}${count(decision.num_tokens)} tokens, ${count(decision.overlap.longest_matched)} of them reused (${percent(decision.overlap.longest_matched, decision.num_tokens)})`],
    ["Why", decision.reason], ["Proof", PROOFS[decision.proof] ?? decision.proof], ["Outcome", outcomeText(decision.outcome)],
  ];
  if (decision.pull) facts.push(["Fetches", pullText(decision.pull)]);
  if (decision.lost_by) facts.push(["Given up", `${count(decision.best_hit_tokens - decision.overlap.longest_matched)} tokens that another worker holds, by ${decision.lost_by}`]);
  if (decision.prefill) facts.push(["Prefill", `${route(decision.prefill)}: ${decision.prefill.reason}`]);
  if (decision.earlier) facts.push(["Attempts before", decision.earlier.join(", ")]);
  facts.push(["In a terminal", copied(`kvrouter explain --url ${location.origin} --request ${quoted(id)}`, "the command")]);
  return [
    el("h3", { id: HEADING, tabindex: -1, text: `To ${worker}, ${clock(decision.time_s)}` }),
    el("p", { class: "actions" }, el("a", { class: "back", href: hashOf({ ...place(), id: "" }), text: "Back to the list" }),
      copyButton(location.origin + location.pathname + hashOf({ id, worker: "", only: "" }), "to this decision", "Copy link"),
      trace ? el("a", { href: trace, rel: "noreferrer", text: "Trace" }) : null),
    el("dl", { class: "facts" }, facts.map(([name, text]) => [el("dt", { text: name }), el("dd", {}, text)])),
    el("div", { "data-key": decision.selection_id }, costs(decision.candidates ?? [], worker, workers, decision.compared)),
  ];
}

function outcomeCell(outcome) {
  if (!outcome) return el("span", { class: "quiet", text: "–" });
  const text = outcome.outcome.replaceAll("_", " ");
  const tone = TONES[outcome.outcome] ?? "bad";
  return tone ? pill(text, tone) : el("span", { class: "quiet", text });
}

function deliveredCell({ delivered_tokens: delivered, predicted_tokens: predicted } = {}) {
  if (delivered === null || delivered === undefined) return el("span", { class: "quiet", text: "–" });
  if (predicted === null || delivered === predicted) return count(delivered);
  const more = delivered > predicted;
  return [count(delivered), " ", pill(`${more ? "+" : "−"}${count(Math.abs(delivered - predicted))}`, more ? "" : "warn")];
}

function rows(shown, openId) {
  const here = place();
  return table({
    caption: shown.length < LISTED ? `${count(shown.length)} decisions, the newest first` : `The last ${LISTED}, the newest first`,
    cards: true,
    columns: [{ name: "Time" }, { name: "Worker" }, ...["Prompt", "Predicted", "Delivered", "First token"].map((name) => ({ name, number: true })), { name: "Outcome" }, { name: "Why" }],
    keys: shown.map((decision) => decision.selection_id),
    classes: shown.map((decision) => (decision.selection_id === openId ? "chosen" : null)),
    rows: shown.map((decision) => {
      // The outcome of a list may be about its last prompt alone.
      const predicted = decision.num_prompts > 1 ? decision.overlap.longest_matched : decision.outcome?.predicted_tokens ?? decision.overlap.longest_matched;
      return [
        el("a", { class: "time", href: hashOf({ ...here, id: decision.selection_id }), "data-row": decision.selection_id,
          "aria-current": decision.selection_id === openId ? "true" : null, "aria-label": `Explain the choice of ${clock(decision.time_s)}`, text: clock(decision.time_s) }),
        el("span", { class: "id", title: route(decision), text: middle(route(decision), ID_CHARS) }), decision.num_prompts > 1 ? [count(decision.num_tokens), el("span", { class: "small quiet", text: ` in ${count(decision.num_prompts)}` })] : count(decision.num_tokens), predicted ? [count(predicted), el("span", { class: "small quiet", text: ` ${percent(predicted, decision.num_tokens)}` })] : count(predicted),
        deliveredCell(decision.outcome ?? {}), seconds(decision.outcome?.ttft_s), outcomeCell(decision.outcome), decision.reason,
      ];
    }),
  });
}

function shownList(openId) {
  if (!list) return el("p", { class: "quiet", text: "Loading…" });
  if (list.decisions.length) return rows(list.decisions, openId);
  const { only, worker } = place();
  if (!(list.kept ?? list.decisions.length)) return el("p", { class: "quiet", text: "No request was placed yet. Send one to /v1/chat/completions, or ask /select." });
  const looked = `the last ${count(list.searched)} decisions`;
  return el("p", { class: "quiet", text: `${worker ? `Among those of ${looked} that chose ${worker},` : `In ${looked},`} ${NONE[only] ?? NONE[""]}.` });
}

function update(app) {
  const { state } = app;
  const { id, worker, only } = place();
  // Read the list even while it is paused, because the filters have changed.
  if (read !== pathOf(state)) refresh(app);
  const newer = paused ? made(state.log) - decisionsBefore : 0;
  show(document.getElementById("decisions-paused"), paused ? `Paused${newer ? `, ${count(newer)} newer` : ""}.` : "");
  document.getElementById("decisions-pause").textContent = paused ? "Resume" : "Pause";
  const form = document.getElementById("decisions-filters");
  // Do not overwrite a text that is being typed.
  if (document.activeElement !== form.elements.worker) form.elements.worker.value = worker;
  form.elements.only.value = only;
  show(document.getElementById("decisions-workers"), [...new Set(state.workers.map(route))].map((name) => el("option", { value: name })));
  document.getElementById("decisions-split").className = id ? "split open" : "split";
  show(document.getElementById("decisions-list"), shownList(explained?.selection_id));
  const pane = document.getElementById("decision");
  if (!id) show(pane);
  else if (problem) show(pane, el("p", { class: "actions" }, el("a", { class: "back", href: hashOf({ ...place(), id: "" }), text: "Back to the list" })), el("p", { class: "notice", text: problem }));
  else if (explained) show(pane, ...detail(explained, state));
  else show(pane, el("p", { class: "quiet", text: "Loading…" }));
}

function tools(app) {
  return [
    el("form", { class: "fields", id: "decisions-filters", on: {
      submit: (event) => event.preventDefault(),
      change: ({ target }) => goTo({ [target.name]: target.value.trim() }),
    } },
    el("label", {}, el("span", { text: "Worker" }), el("input", { name: "worker", type: "search", list: "decisions-workers", autocomplete: "off", placeholder: "all" }), el("datalist", { id: "decisions-workers" })),
    el("label", {}, el("span", { text: "Show" }), el("select", { name: "only" }, KINDS.map(([value, text]) => el("option", { value, text })))),
    el("div", {}, el("button", { type: "button", class: "second", id: "decisions-pause", text: "Pause", on: { click: () => (paused ? resume(app) : pause("person", app)) } }),
      " ", el("span", { id: "decisions-paused", class: "quiet", role: "status" }))),
    el("form", { class: "fields", role: "search", on: { submit: (event) => {
      event.preventDefault();
      goTo({ id: event.target.elements.id.value.trim() });
    } } },
    el("label", {}, el("span", { text: "x-request-id or selection id" }), el("input", { name: "id", required: true, autocomplete: "off" })),
    el("div", {}, el("button", { type: "submit", class: "second", text: "Explain" }))),
  ];
}

/** A click anywhere in a row opens it, unless it selects text or is meant for something else. */
function clicked(event) {
  if (event.target.closest("a, button") || !getSelection().isCollapsed) return;
  const link = event.target.closest("tbody tr")?.querySelector("a");
  if (link) location.hash = link.hash;
}

export const decisions = {
  id: "decisions",
  title: "Decisions",
  mount(root, app) {
    root.append(el("h2", { text: "Decisions" }), el("div", { class: "tools" }, tools(app)),
      el("div", { id: "decisions-split", class: "split" },
        el("section", { class: "panel list", "aria-label": "Last decisions" }, el("div", { id: "decisions-list", on: { click: clicked } })),
        el("section", { class: "panel pane", "aria-label": "Why" }, el("div", { id: "decision" }))));
    this.timer = setInterval(() => {
      if (document.hidden) return;
      if (!paused) refresh(app);
      if (explained && !explained.outcome && Date.now() / 1000 - explained.time_s < OPEN_S) explain(app, place().id);
    }, POLL_MS);
    list = null;
    read = "";
    this.moved(app);
  },
  moved(app) {
    const { id } = place();
    const wasOpen = explained || problem;
    problem = "";
    if (!id) {
      explained = null;
      if (paused === "reading") resume(app);
      if (wasOpen) requestAnimationFrame(() => requestAnimationFrame(() => scrollTo(0, scrolled)));
    } else if (explained?.selection_id !== id && explained?.request_id !== id) {
      open(app);
    }
    if (!paused) refresh(app);
  },
  unmount() {
    clearInterval(this.timer);
    paused = "";
    explained = null;
  },
  close() {
    if (place().id) goTo({ id: "" });
  },
  update,
};
