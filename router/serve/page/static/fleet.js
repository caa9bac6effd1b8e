// SPDX-License-Identifier: Apache-2.0
// Workers: a heat map of all of them, and a row for each, which opens to show its details and the blocks of each group.

import { copyButton } from "./copy.js";
import { changes, el, meter, pill, show, tiles } from "./dom.js";
import { Heatmap, MODES } from "./heatmap.js";
import { brief, count, counted, decoded, middle, percent, seconds, tone } from "./words.js";
import { NO_WORKER, inTrouble, modelsOf, recoveries, workerRows } from "./workers.js";

const MEDIA = ["GPU", "CPU", "STORAGE"];
const MOST_ROWS = 100;
const MOST_CARDS = 25;
const MOST_NOTICES = 3;
// How much of a long id is shown on a phone, so that the state is beside it.
const SHORT_CHARS = 16;
const narrow = matchMedia("(max-width: 760px)");

const NOT_KNOWN = el("span", { class: "quiet", text: "–" });
const some = (value, write) => (value === null ? NOT_KNOWN.cloneNode(true) : write(value));

/** The columns of the table. sorts: returns the value by which rows are sorted, the largest first; null comes last. */
const COLUMNS = [
  { id: "worker", name: "Worker" },
  { id: "state", name: "State", sorts: (row) => row.trouble },
  { id: "fill", name: "Cache", sorts: (row) => row.fill ?? row.held },
  { id: "requests", name: "Requests", number: true, sorts: (row) => row.requests },
  { id: "queued", name: "Queued tokens", short: "Queued", number: true, sorts: (row) => row.queued },
  { id: "share", name: "Hit share", short: "Hits", number: true, sorts: (row) => row.share },
  { id: "lag", name: "Lag", number: true, sorts: (row) => row.lag_s },
];

// State of the view. wanted: the id of a worker whose row is opened as soon as the worker is known. found: the filtered rows
// in order. version: a number that changes with any of the others.
const shown = { filter: "", wanted: "", column: "state", isAscending: false, page: 0, mode: "fill", open: new Set(), found: [], version: 0 };
let heatmap = null;
let isChanged = changes();

function residency(row) {
  const media = [...new Set(row.groups.flatMap((group) => [...group.media.keys()]))].sort((a, b) => (MEDIA.indexOf(a) + 9) % 9 - (MEDIA.indexOf(b) + 9) % 9);
  if (!media.length) return el("p", { class: "quiet", text: "Blocks held: none, the cache is empty." });
  return el("table", { class: "inner" }, el("caption", { text: "Blocks held" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "Group" }), media.map((medium) => el("th", { scope: "col", class: "number", text: medium })))),
    el("tbody", {}, row.groups.map((group) => el("tr", {}, el("th", { scope: "row", text: `${group.name} ${group.kind}` }),
      media.map((medium) => el("td", { class: "number", text: count(group.media.get(medium) ?? 0) }))))));
}

const peerAddress = ({ host, port }) => `${host.includes(":") ? `[${host}]` : host}:${port}`;

function facts({ worker, load, capacity }) {
  const { recovery, reuse, tokens, engine_cache: cache } = worker;
  const recovered = recoveries(worker).filter(({ number }) => number).map(({ how, number }) => `, ${counted(number, how)}`).join("");
  const lost = recovery.ghost_blocks + recovery.lost_blocks;
  return [
    ["Address", worker.url ? [`${worker.url} `, copyButton(worker.url, "the worker's address")] : "none"], ["Model", worker.model],
    ["State", `${worker.state.replaceAll("_", " ")} for ${seconds(worker.state_age_s)}${worker.draining ? ", draining" : ""}${worker.credited ? "" : ", earns no credit"}`],
    ["Engine", `${worker.engine}${worker.role === "both" ? "" : `, only ${worker.role}`}, ${worker.hash_scheme || "hash scheme not known yet"}`],
    ["Cache", capacity ? `${count(capacity)} blocks${cache.tokens ? `, ${count(cache.tokens)} tokens` : ""}` : "size not reported by the engine"],
    ["Events", `${worker.last_event_age_s === null ? "none yet" : `last ${seconds(worker.last_event_age_s)} ago`}, ${counted(worker.gaps, "gap")}${recovered}${lost ? `, ${count(lost)} blocks differed from a snapshot` : ""}`],
    ["Load", load ? `${counted(load.active_requests, "request")}, ${count(load.potential_prefill_tokens)} tokens queued${load.saturated ? ", saturated" : ""}${load.engine ? `; the engine reports ${count(load.engine.running)} running, ${count(load.engine.waiting)} waiting` : ""}` : "not known"],
    ["Speed", load?.prefill_rate ? `${brief(load.prefill_rate)} prompt tokens/s` : "not measured yet"],
    ["Predictions", reuse?.answers ? `${percent(reuse.delivered_tokens, reuse.predicted_tokens)} of predicted tokens reused, ${counted(reuse.answers, "answer")}` : "no answer yet"],
    ["Texts", tokens ? `${tokens.way === "none" ? "not tokenized" : `tokenized by ${tokens.way}`}${tokens.problem ? `: ${tokens.problem}` : ""}` : "–"],
    ["Listed by", worker.source],
    ...worker.peer ? [["Lends", `blocks of its CPU tier, at ${peerAddress(worker.peer)}${load?.lent_tokens ? `, now ${counted(load.lent_tokens, "token")}` : ""}`]] : [],
  ];
}

function details(row) {
  return el("tr", { class: "details", "data-key": `${row.key} details` }, el("td", { colspan: COLUMNS.length },
    row.reasons.map((text) => el("p", { text })),
    el("div", { class: "halves" },
      el("dl", { class: "facts" }, facts(row).map(([name, value]) => [el("dt", { text: name }), el("dd", {}, value)])),
      residency(row)),
    el("p", {}, el("a", { href: `#doctor/${encodeURIComponent(row.id)}`, text: "The doctor's findings" }))));
}

function cache(row) {
  if (!row.held && !row.capacity) return el("span", { class: "quiet", text: "empty" });
  return el("div", { class: "cache" }, row.fill === null ? null : meter(row.fill, "Cache filled"),
    el("span", { text: row.capacity ? `${brief(row.held)} of ${brief(row.capacity)}` : `${brief(row.held)} blocks` }));
}

function state(row) {
  const { worker } = row;
  return el("div", { class: "state" }, pill(worker.state.replaceAll("_", " "), tone(worker.state)),
    worker.draining ? pill("draining", "warn") : null, worker.approximate ? pill("approximate", "warn") : null,
    row.load?.saturated ? pill("saturated", "warn") : null,
    row.reasons.length ? el("span", { class: "reason quiet", title: row.reasons.join("; "), text: row.reasons[0] }) : null);
}

function line(row, isMixed) {
  const isOpen = shown.open.has(row.key);
  const cells = {
    worker: el("button", { class: "disclose", type: "button", "aria-expanded": String(isOpen), title: row.id, text: middle(row.id, narrow.matches ? SHORT_CHARS : undefined) }),
    state: state(row), fill: cache(row), requests: some(row.requests, count), queued: some(row.queued, brief),
    share: some(row.share, (value) => percent(value, 1)), lag: some(row.lag_s, seconds),
  };
  return el("tr", { class: isOpen ? "open" : null, "data-key": row.key, "data-row": row.key }, COLUMNS.map((column, i) =>
    el(i ? "td" : "th", { scope: i ? null : "row", class: `of-${column.id} ${column.number ? "number" : ""}`, "data-label": column.short ?? column.name },
      cells[column.id], i || !isMixed ? null : el("span", { class: "small quiet model", text: middle(row.worker.model, 24) }))));
}

function head() {
  return el("thead", {}, el("tr", {}, COLUMNS.map(({ id, name, number }) => {
    const isSorted = id === shown.column;
    const order = shown.isAscending ? "ascending" : "descending";
    return el("th", { scope: "col", class: `of-${id} ${number ? "number" : ""}`, "aria-sort": isSorted ? order : null },
      el("button", { type: "button", class: "sort", "data-sort": id },
        name, el("span", { "aria-hidden": "true", text: isSorted ? (shown.isAscending ? " ▲" : " ▼") : "" })));
  })));
}

/** Returns the rows whose id, model, address or state contains the filter's text. "trouble" finds workers in trouble. */
function filtered(rows) {
  const text = shown.filter.toLowerCase();
  if (!text) return rows;
  if (text === "trouble") return inTrouble(rows);
  return rows.filter(({ id, worker }) => [id, worker.model, worker.url ?? "", worker.state.replaceAll("_", " "), worker.draining ? "draining" : ""]
    .some((part) => part.toLowerCase().includes(text)));
}

function sorted(rows) {
  const by = COLUMNS.find((column) => column.id === shown.column).sorts;
  // The rows are sorted by id already.
  if (!by) return shown.isAscending ? rows : [...rows].reverse();
  const sign = shown.isAscending ? 1 : -1;
  const known = rows.filter((row) => by(row) !== null);
  const unknown = rows.filter((row) => by(row) === null);
  return [...known.sort((a, b) => sign * (by(a) - by(b))), ...unknown];
}

/** Returns notices for those reasons of the router's health that no worker's row shows. */
function notices({ health, workers }) {
  if (!health) return [];
  const given = new Set(workers.map((worker) => worker.reason).filter(Boolean));
  const reasons = health.reasons.filter((text) => ![...given].some((reason) => text.includes(reason)));
  const parts = [...reasons.map((text) => [text, ""]), ...(health.warnings ?? []).map((text) => [text, "warning"])];
  const more = parts.length - MOST_NOTICES;
  return [
    ...parts.slice(0, MOST_NOTICES).map(([text, kind]) => el("p", { class: `notice ${kind}`, text })),
    more > 0 ? el("p", {}, el("a", { href: "#doctor", text: `${count(more)} more` })) : null,
  ];
}

function summary({ loads, model }, rows) {
  const sum = (read) => rows.reduce((all, row) => all + (read(row) ?? 0), 0);
  const held = sum((row) => (row.capacity ? row.held : 0));
  const capacity = sum((row) => row.capacity);
  const waiting = loads.filter((load) => !model || load.model_name === model).reduce((all, load) => all + load.pending_count, 0);
  return tiles([
    ["Workers live", `${count(rows.filter((row) => row.worker.state === "live").length)} of ${count(rows.length)}`],
    ["In trouble", count(inTrouble(rows).length)],
    ["Cache filled", percent(held, capacity), capacity ? `${brief(held)} of ${brief(capacity)} blocks` : rows.length ? "size not reported" : ""],
    ["Requests", count(sum((row) => row.requests)), "in flight"],
    ["Waiting", count(waiting), "prompts"],
  ]);
}

function pager(length, first, most) {
  if (length <= most) return null;
  return el("div", { class: "pager" },
    el("button", { type: "button", class: "second", "data-page": "-1", disabled: first === 0, text: "Previous" }),
    el("span", { text: `${count(first + 1)} to ${count(Math.min(length, first + most))} of ${count(length)}` }),
    el("button", { type: "button", class: "second", "data-page": "1", disabled: first + most >= length, text: "Next" }));
}

function update(app) {
  const { state: known } = app;
  if (!isChanged(known.workers, known.loads, known.health, known.model, narrow.matches, shown.version)) return;
  const all = workerRows(known);
  if (shown.wanted && all.length) {
    for (const row of all) if ([row.id, row.worker.worker_id].includes(shown.wanted)) shown.open.add(row.key);
    shown.wanted = "";
  }
  const found = sorted(filtered(all));
  const most = narrow.matches ? MOST_CARDS : MOST_ROWS;
  shown.page = Math.min(shown.page, Math.max(0, Math.ceil(found.length / most) - 1));
  const first = shown.page * most;
  const rows = found.slice(first, first + most);
  const isMixed = !known.model && modelsOf(known).length > 1;
  shown.found = found;
  show(document.getElementById("fleet-now"), ...notices(known), summary(known, all));
  document.getElementById("fleet-heat").hidden = !found.length;
  heatmap.set(found, rows, shown.mode);
  const empty = shown.filter ? "No worker matches." : known.health ? NO_WORKER : "";
  show(document.getElementById("fleet-workers"),
    rows.length ? el("div", { class: "scroll" }, el("table", { class: "fleet" }, el("caption", { text: `${counted(found.length, "worker")}${shown.filter ? " found" : ""}` }),
      head(), el("tbody", {}, rows.map((row) => [line(row, isMixed), shown.open.has(row.key) ? details(row) : null])))) : el("p", { class: "quiet", text: empty }),
    pager(found.length, first, most));
}

function changed(app) {
  shown.version += 1;
  app.changed();
}

function toggle(app, key) {
  if (!shown.open.delete(key)) shown.open.add(key);
  changed(app);
}

function pressed(app, event) {
  const { target } = event;
  const sort = target.closest("[data-sort]")?.dataset.sort;
  const by = target.closest("[data-page]")?.dataset.page;
  const row = target.closest("[data-row]");
  if (sort) {
    shown.isAscending = sort === shown.column ? !shown.isAscending : sort === "worker";
    shown.column = sort;
    shown.page = 0;
    changed(app);
  } else if (by) {
    shown.page += Number(by);
    changed(app);
    document.getElementById("fleet-workers").scrollIntoView();
  } else if (row && !String(getSelection())) {
    toggle(app, row.dataset.row);
  }
}

/** Shows the page with a worker's row, and opens the row. */
function openRow(app, row) {
  const most = narrow.matches ? MOST_CARDS : MOST_ROWS;
  shown.page = Math.floor(shown.found.indexOf(row) / most);
  shown.open.add(row.key);
  changed(app);
  requestAnimationFrame(() => requestAnimationFrame(() =>
    document.querySelector(`[data-row="${CSS.escape(row.key)}"]`)?.scrollIntoView({ block: "center" })));
}

const named = () => decoded(location.hash.split("/").slice(1).join("/"));

export const fleet = {
  id: "fleet",
  title: "Fleet",
  mount(root, app) {
    heatmap ??= new Heatmap((row) => openRow(app, row));
    isChanged = changes();
    root.append(el("h2", { text: "Fleet" }), el("div", { id: "fleet-now" }),
      el("section", { class: "panel", id: "fleet-heat", "aria-label": "Heat map" },
        el("fieldset", { class: "modes", on: { change: (event) => {
          shown.mode = event.target.value;
          changed(app);
        } } }, el("legend", { class: "unseen", text: "Colour shows" }), Object.entries(MODES).map(([value, { title }]) =>
          el("label", {}, el("input", { type: "radio", name: "mode", value, checked: value === shown.mode }), ` ${title}`))),
        heatmap.node),
      el("section", { class: "panel", "aria-label": "Workers" },
        el("input", { type: "search", placeholder: "Filter", "aria-label": "Filter by id, model, address or state", autocomplete: "off", on: { input: (event) => {
          shown.filter = event.target.value.trim();
          shown.page = 0;
          changed(app);
        } } }),
        el("div", { id: "fleet-workers", on: { click: (event) => pressed(app, event) } })));
    heatmap.mount();
    this.moved(app);
  },
  /** #fleet/TEXT filters by a text; a link to one worker also opens its row. */
  moved(app) {
    shown.filter = shown.wanted = named();
    document.querySelector("#view input[type=search]").value = shown.filter;
    changed(app);
  },
  unmount() {
    heatmap.unmount();
  },
  close(app) {
    shown.open.clear();
    changed(app);
  },
  update,
};
