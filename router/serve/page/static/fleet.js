// SPDX-License-Identifier: Apache-2.0
// Workers, what they hold group by group and medium by medium, and how busy they are.

import { el, meter, pill, show, table, tiles } from "./dom.js";
import { brief, count, group, percent, route, seconds, tone } from "./words.js";

const MEDIA = ["GPU", "CPU", "STORAGE"];
// More rows than anybody reads, and than a browser changes in a blink.
const MOST_ROWS = 200;

let wanted = "";

/** {"g0:GPU": 12} of a worker as a small table: a row for each group, a column for each medium. */
function residency(worker) {
  const kinds = new Map((worker.catalog?.groups ?? []).map((one) => [group(one.group_idx), one.kind]));
  const held = new Map();
  const media = new Set();
  for (const [place, blocks] of Object.entries(worker.residency)) {
    const [name, medium] = place.split(":");
    media.add(medium);
    if (!held.has(name)) held.set(name, new Map());
    held.get(name).set(medium, (held.get(name).get(medium) ?? 0) + blocks);
  }
  for (const name of kinds.keys()) if (!held.has(name)) held.set(name, new Map());
  if (!held.size) return el("span", { class: "quiet", text: "nothing known" });
  const columns = [...media].sort((a, b) => (MEDIA.indexOf(a) + 9) % 9 - (MEDIA.indexOf(b) + 9) % 9);
  if (!columns.length) columns.push("GPU");
  const rows = [...held.keys()].sort().map((name) => el("tr", {},
    el("th", { scope: "row", text: `${name} ${(kinds.get(name) ?? "").replaceAll("_", " ")}` }),
    columns.map((medium) => el("td", { class: "number", text: count(held.get(name).get(medium) ?? 0) }))));
  return el("table", { class: "inner" }, el("thead", {}, el("tr", {}, el("td"),
    columns.map((medium) => el("th", { scope: "col", class: "number", text: medium })))), el("tbody", {}, rows));
}

function state(worker) {
  const cell = el("div", {}, pill(worker.state.replaceAll("_", " "), tone(worker.state)), " ");
  if (worker.draining) cell.append(pill("draining", "warn"), " ");
  if (worker.approximate) cell.append(pill("approximate", "warn"), " ");
  for (const reason of new Set([worker.reason, worker.closed, worker.predictions].filter(Boolean))) {
    cell.append(el("div", { class: "small quiet", text: reason }));
  }
  return cell;
}

function load(one) {
  if (!one) return el("span", { class: "quiet", text: "–" });
  const cell = el("div", { class: "small" },
    el("div", { text: `${count(one.active_requests)} ${one.active_requests === 1 ? "request" : "requests"}, ${brief(one.potential_prefill_tokens)} tokens queued` }));
  if (one.saturated) cell.append(pill("saturated", "warn"));
  if (one.engine) cell.append(meter(one.engine.kv_usage, "KV cache in use"));
  return cell;
}

function reused(worker) {
  const known = worker.reuse;
  if (!known || !known.answers) return el("span", { class: "quiet", text: "no answers yet" });
  return el("div", { class: "small" },
    `${brief(known.predicted_tokens)} predicted`, el("br"), `${brief(known.delivered_tokens)} delivered`, el("br"),
    `${percent(known.delivered_tokens, known.predicted_tokens)} of predicted`);
}

function update({ state: known }) {
  const { workers, loads, health } = known;
  const rankLoads = new Map(loads.flatMap((model) =>
    model.loads.map((one) => [`${model.model_name}/${route(one)}`, one])));
  const blocks = workers.reduce((sum, one) => sum + Object.values(one.residency).reduce((a, b) => a + b, 0), 0);
  const requests = [...rankLoads.values()].reduce((sum, one) => sum + one.active_requests, 0);
  const text = wanted.toLowerCase();
  const found = workers.filter((one) => !text ||
    [route(one), one.model, one.url ?? "", one.state, one.draining ? "draining" : ""].some((part) => part.toLowerCase().includes(text)));
  const rows = found.slice(0, MOST_ROWS);
  show(document.getElementById("fleet-now"),
    ...(health?.reasons ?? []).map((reason) => el("p", { class: "notice", text: reason })),
    ...(health?.warnings ?? []).map((reason) => el("p", { class: "notice warning", text: reason })),
    tiles([
      ["Workers live", `${workers.filter((one) => one.state === "live").length} of ${workers.length}`],
      ["Blocks held", brief(blocks)],
      ["Requests in flight", count(requests)],
      ["Prompts waiting", count(loads.reduce((sum, one) => sum + one.pending_count, 0))],
    ]));
  show(document.getElementById("fleet-workers"),
    table({
      caption: "Workers: blocks by group and medium, state, load, reuse",
      cards: true,
      columns: [{ name: "Worker" }, { name: "State" }, { name: "Blocks held" }, { name: "Load" }, { name: "Reuse" }, { name: "Lag" }],
      keys: rows.map((one) => `${one.model}/${route(one)}`),
      rows: rows.map((one) => [
        el("div", {}, el("strong", { text: route(one) }), el("div", { class: "small quiet", text: one.model }),
          el("div", { class: "small quiet", text: one.url ?? "no address" })),
        state(one), residency(one), load(rankLoads.get(`${one.model}/${route(one)}`)), reused(one),
        one.lag_ms === null ? "–" : seconds(one.lag_ms / 1000),
      ]),
      empty: wanted ? "No worker matches." : "No worker is registered: POST /register, or start with --worker.",
    }),
    found.length > rows.length ? el("p", { class: "quiet", text: `${count(found.length - rows.length)} more match: write more of what you look for.` }) : null);
}

export const fleet = {
  id: "fleet",
  title: "Fleet",
  mount(root, app) {
    root.append(el("h2", { text: "Fleet" }), el("div", { id: "fleet-now" }),
      el("section", { class: "panel", "aria-label": "Workers" },
        el("label", {}, el("span", { text: "Only workers with this in id, model, address or state" }),
          el("input", { type: "search", value: wanted, autocomplete: "off", on: { input: (event) => {
            wanted = event.target.value.trim();
            app.changed();
          } } })),
        el("div", { id: "fleet-workers" })));
  },
  update,
};
