// SPDX-License-Identifier: Apache-2.0
// The stream of events: how much of it, how late, what was missing, and the last of them in words.

import { Chart } from "./chart.js";
import { el, pill, show, table, tiles } from "./dom.js";
import { blocks, brief, clock, count, group, middle, route, seconds } from "./words.js";
import { NO_WORKER, recoveries } from "./workers.js";

const KEPT = 300;
const MOST_STREAMS = 20;
// How much of a worker's id the tables show.
const ID_CHARS = 20;
const BLOCKS = new Set(["stored", "removed"]);
const TYPES = ["stored", "removed", "cleared", "epoch", "gap", "resync", "state", "decision", "outcome", "lost"];

export class EventLog {
  constructor() {
    this.connected = false;
    this.last = [];
    this.counts = new Map();
    this.skipped = 0;
    this.lost = "";
    this.since = { events: 0, stored: 0, removed: 0 };
    this.rate = new Chart("Blocks a second", "blocks/s", [["stored", "--held"], ["removed", "--part-queued"]]);
    this.eventsRate = 0;
    this.before_s = null;
  }

  add({ type, data }) {
    this.counts.set(type, (this.counts.get(type) ?? 0) + 1);
    this.since.events += 1;
    if (BLOCKS.has(type)) this.since[type] += data.blocks;
    if (data.skipped) this.skipped += data.skipped;
    if (type === "lost") this.lost = data.reason;
    this.last.unshift(data);
    if (this.last.length > KEPT) this.last.length = KEPT;
  }

  tick(time_s) {
    if (this.before_s !== null) {
      const passed_s = time_s - this.before_s;
      this.eventsRate = this.since.events / passed_s;
      this.rate.add(time_s, [this.since.stored / passed_s, this.since.removed / passed_s]);
    }
    this.since = { events: 0, stored: 0, removed: 0 };
    this.before_s = time_s;
  }
}

function words(event) {
  switch (event.type) {
    case "stored":
    case "removed": return `${blocks(event.blocks)} ${event.type}, ${group(event.group_idx)} ${event.medium}, batch ${event.seq}`;
    case "state": return `is ${event.state.replaceAll("_", " ")}${event.reason ? `: ${event.reason}` : ""}`;
    case "epoch": return `a new epoch: ${event.reason ?? ""}`;
    case "decision": return `${count(event.num_tokens)} tokens, ${event.reason}`;
    case "outcome": return [`${event.failed ? "failed: " : ""}${event.outcome.replaceAll("_", " ")}`,
      event.status && `status ${event.status}`, event.predicted_tokens !== undefined && `${count(event.predicted_tokens)} tokens predicted`,
      event.delivered_tokens !== undefined && `${count(event.delivered_tokens)} delivered`, `after ${seconds(event.e2e_s)}`].filter(Boolean).join(", ");
    default: return `${event.count > 1 ? `${count(event.count)} times: ` : ""}${event.reason ?? ""}`;
  }
}

const recovered = (worker) => recoveries(worker).reduce((sum, { number }) => sum + number, 0);

let shown = new Set(TYPES);
let paused = null;

function update({ state }) {
  const { log, workers } = state;
  const gaps = workers.reduce((sum, worker) => sum + worker.gaps, 0);
  const resyncs = workers.reduce((sum, worker) => sum + recovered(worker), 0);
  const lags = workers.map((worker) => worker.lag_ms).filter((lag) => lag !== null);
  show(document.getElementById("events-now"),
    log.lost ? el("p", { class: "notice warning", text: `Some events were missed: ${log.lost}` }) : null,
    tiles([
      ["Events", brief(log.eventsRate), "a second"], ["Largest lag", lags.length ? seconds(Math.max(...lags) / 1000) : "–"],
      ["Gaps", count(gaps)], ["Recoveries", count(resyncs)],
      ["Blocks unaccounted for", count(workers.reduce((sum, worker) => sum + worker.recovery.ghost_blocks + worker.recovery.lost_blocks, 0))],
    ]));
  const troubled = [...workers].sort((a, b) => b.gaps - a.gaps || (b.lag_ms ?? 0) - (a.lag_ms ?? 0)).slice(0, MOST_STREAMS);
  show(document.getElementById("events-workers"), table({
    caption: `${workers.length > MOST_STREAMS ? `${MOST_STREAMS} of ${count(workers.length)} streams` : "Streams"}, those with the most gaps first`, cards: true,
    columns: [{ name: "Worker" }, ...["Lag", "Last event", "Batch", "Gaps", "Missed", "Recoveries"].map((name) => ({ name, number: true }))],
    keys: troubled.map((worker) => `${worker.model}/${route(worker)}`),
    rows: troubled.map((worker) => [middle(route(worker), ID_CHARS), worker.lag_ms === null ? "–" : seconds(worker.lag_ms / 1000),
      worker.last_event_age_s === null ? "–" : `${seconds(worker.last_event_age_s)} ago`, count(worker.seq), count(worker.gaps),
      count(worker.recovery.missed_batches), count(recovered(worker))]),
    empty: NO_WORKER,
  }));
  show(document.getElementById("events-counts"), [...log.counts].sort().map(([type, number]) => [pill(`${type} ${count(number)}`, ""), " "]),
    log.skipped ? el("span", { class: "quiet" }, `${count(log.skipped)} more decisions are not listed here; `, el("a", { href: "#decisions", text: "Decisions" }), " has all of them.") : null);
  const rows = (paused ?? log.last).filter((event) => shown.has(event.type)).slice(0, 100);
  show(document.getElementById("events-log"), table({
    caption: paused ? "The last 100, paused" : "The last 100, the newest first",
    cards: true, columns: [{ name: "Time" }, { name: "Event" }, { name: "Worker" }, { name: "What" }],
    rows: rows.map((event) => [clock(event.time_s), event.type, event.worker_id === undefined ? "–" : middle(route(event), ID_CHARS), words(event)]),
    empty: !log.connected ? "Not connected." : workers.length ? "Nothing happens: an idle engine sends no events." : NO_WORKER,
  }));
}

export const eventsView = {
  id: "events",
  title: "Events",
  mount(root, app) {
    const { rate } = app.state.log;
    root.append(el("h2", { text: "Events" }), el("div", { id: "events-now" }),
      el("section", { class: "panel" }, el("h3", { text: rate.title }), rate.node),
      el("section", { class: "panel" }, el("h3", { text: "Streams" }), el("div", { id: "events-workers" })),
      el("section", { class: "panel" }, el("h3", { text: "Log" }),
        el("fieldset", { on: { change: (event) => {
          if (event.target.checked) shown.add(event.target.value);
          else shown.delete(event.target.value);
          app.changed();
        } } }, el("legend", { class: "small quiet", text: "Show" }), TYPES.map((type) =>
          el("label", {}, el("input", { type: "checkbox", value: type, checked: shown.has(type) }), ` ${type}`))),
        el("p", {}, el("button", { type: "button", class: "second", text: paused ? "Resume" : "Pause", on: { click: (event) => {
          paused = paused ? null : [...app.state.log.last];
          event.target.textContent = paused ? "Resume" : "Pause";
          app.changed();
        } } })),
        el("p", { id: "events-counts", class: "small" }), el("div", { id: "events-log", class: "log" })));
    rate.mount();
    this.chart = rate;
  },
  unmount() {
    this.chart.unmount();
  },
  update,
};
