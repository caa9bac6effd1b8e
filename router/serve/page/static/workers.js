// SPDX-License-Identifier: Apache-2.0
// The facts about a worker that several views show: its fill, its load, its reuse, and what is wrong with it.

import { changes } from "./dom.js";
import { group, route, tone } from "./words.js";

// How urgent the trouble of a worker is, in rising order.
export const FINE = 0;
export const NOTED = 1;
export const DOUBTED = 2;
export const BROKEN = 3;

export const NO_WORKER = "No worker is registered: start with --worker, or run kvrouter add.";

const collator = new Intl.Collator("en", { numeric: true });

/** Returns how a worker's stream recovered after gaps: [{how, number}] of each way. */
export const recoveries = ({ recovery }) => [["replay", recovery.replays], ["snapshot", recovery.snapshots], ["relearning", recovery.relearned]]
  .map(([how, number]) => ({ how, number }));

/** Returns the sentences about a worker, without those that only repeat another. */
function reasons(worker) {
  const sentences = [];
  for (const text of [worker.reason, worker.predictions, worker.closed]) {
    if (text && !sentences.some((sentence) => text.includes(sentence) || sentence.includes(text))) sentences.push(text);
  }
  return sentences;
}

function trouble(worker, load) {
  if (tone(worker.state) === "bad") return BROKEN;
  // A draining worker is closed on purpose, so that is no trouble.
  if (worker.closed && !worker.draining) return BROKEN;
  if (worker.predictions || load?.saturated || (worker.state !== "live" && !worker.approximate)) return DOUBTED;
  return worker.draining || worker.approximate || worker.reason ? NOTED : FINE;
}

/** Returns a worker's groups, each with its kind and its blocks by medium. */
function groupsOf(worker) {
  const groups = new Map((worker.catalog?.groups ?? []).map((cacheGroup) =>
    [group(cacheGroup.group_idx), { name: group(cacheGroup.group_idx), kind: cacheGroup.kind.replaceAll("_", " "), media: new Map() }]));
  for (const [place, blocks] of Object.entries(worker.residency)) {
    const [name, medium] = place.split(":");
    if (!groups.has(name)) groups.set(name, { name, kind: "", media: new Map() });
    const { media } = groups.get(name);
    media.set(medium, (media.get(medium) ?? 0) + blocks);
  }
  return [...groups.values()].sort((a, b) => collator.compare(a.name, b.name));
}

function rowOf(worker, load) {
  const groups = groupsOf(worker);
  const held = groups.reduce((sum, group) => sum + (group.media.get("GPU") ?? 0), 0);
  const capacity = worker.engine_cache?.blocks ?? null;
  const { prompt_tokens, delivered_tokens } = worker.reuse ?? {};
  return {
    key: `${worker.model}/${route(worker)}`, id: route(worker), worker, load, groups, held, capacity,
    fill: capacity ? held / capacity : null,
    share: prompt_tokens ? delivered_tokens / prompt_tokens : null,
    lag_s: worker.lag_ms === null ? null : worker.lag_ms / 1000,
    requests: load ? load.active_requests : null,
    queued: load ? load.potential_prefill_tokens : null,
    trouble: trouble(worker, load),
    reasons: reasons(worker),
  };
}

let rows = [];
let places = new Map();
const isChanged = changes();

/** Sorts rows by id. Comparing a thousand ids takes long, so their places are remembered until the set of rows changes. */
function sortById(list) {
  if (list.length !== places.size || !list.every((row) => places.has(row.key))) {
    list.sort((a, b) => collator.compare(a.id, b.id) || collator.compare(a.key, b.key));
    places = new Map(list.map((row, i) => [row.key, i]));
  }
  return list.sort((a, b) => places.get(a.key) - places.get(b.key));
}

/** Returns a row for each rank of each worker of the chosen model, by id. Computed once for each answer of the router. */
export function workerRows(state) {
  if (isChanged(state.workers, state.loads, state.model)) {
    const loads = new Map(state.loads.flatMap((model) => model.loads.map((load) => [`${model.model_name}/${route(load)}`, load])));
    rows = sortById(state.workers.filter((worker) => !state.model || worker.model === state.model)
      .map((worker) => rowOf(worker, loads.get(`${worker.model}/${route(worker)}`))));
  }
  return rows;
}

export const inTrouble = (list) => list.filter((row) => row.trouble >= DOUBTED);

export const modelsOf = (state) => [...new Set(state.workers.map((worker) => worker.model))].sort(collator.compare);

/** Returns how many workers there are in all, and how many take requests. The ranks of a worker count as one. */
export function readiness(state) {
  const all = new Set();
  const takers = new Set();
  for (const worker of state.workers) {
    const id = `${worker.model}/${worker.worker_id}`;
    all.add(id);
    if (!worker.closed && worker.state !== "down") takers.add(id);
  }
  return { all: all.size, takers: takers.size };
}
