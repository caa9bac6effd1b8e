// SPDX-License-Identifier: Apache-2.0
// What each worker's cost is made of, as bars beside the numbers.

import { el } from "./dom.js";
import { count, middle, route, tiers, tiersOf, withSource } from "./words.js";

// In the order of the bar: the cost of the prompt itself first, its cost for other prompts last.
const PARTS = {
  prefill: "tokens of this prompt to compute", queued: "other prompts' tokens to compute before it", decode: "answers generated there",
  room: "blocks that this prompt evicts from the worker's cache", delay: "what this prompt costs later ones (waiting, evicted blocks)",
  copy: "(bonus): a copy of a beginning that many prompts share",
  junction: "(bonus): the longest run of full-attention blocks is here, and the next request can resume from it",
  session: "(bonus): the session's last prompt went there",
};
// These make a worker cheaper.
const LESS = new Set(["copy", "junction", "session"]);
// How many workers besides the chosen one are shown at once.
const SHOWN = 4;
// How much of a worker's id is shown, as its column is narrow.
const ID_CHARS = 20;

const parts = (candidate) => Object.keys(PARTS).map((name) => [name, candidate.parts[name] ?? 0]).filter(([, part]) => part !== 0);
const added = (candidate) => parts(candidate).filter(([name, part]) => part > 0 && !LESS.has(name));

/** A list that explains the terms that occur in the candidates' costs. */
function legend(candidates) {
  const names = new Set(candidates.flatMap((candidate) => parts(candidate).map(([name]) => name)));
  return el("ul", { class: "legend", "aria-label": "Terms of the cost, in tokens" },
    Object.entries(PARTS).filter(([name]) => names.has(name)).map(([name, text]) =>
      el("li", {}, el("i", { class: name }), `${name}${text[0] === "(" ? " " : ": "}${text}`)));
}

function reuse(candidate, worker) {
  const limit = candidate.limited_by;
  return el("div", { class: "small" }, tiers(candidate.overlap, tiersOf(worker)),
    candidate.peer ? el("div", { text: withSource(candidate.peer, candidate.overlap.longest_matched) }) : null,
    candidate.pending ? el("div", { class: "quiet", text: `${count(candidate.pending)} tokens of it are being computed there` }) : null,
    limit ? el("div", { class: "quiet", text: `limited by g${limit.group_idx ?? "-"} ${limit.kind.replaceAll("_", " ")}: ${limit.why}` }) : null,
    candidate.reason ? el("div", { class: "quiet", text: candidate.reason }) : null);
}

function row(candidate, chosen, most, worker) {
  const terms = parts(candidate).map(([name, part]) => `${LESS.has(name) ? "less " : ""}${name} ${count(part)}`).join(", ") || "nothing to do";
  return el("tr", { class: route(candidate) === chosen ? "chosen" : null, "data-key": route(candidate) },
    el("th", { scope: "row" }, el("strong", { title: route(candidate), text: middle(route(candidate), ID_CHARS) }),
      route(candidate) === chosen ? el("div", { class: "small", text: "chosen" }) : null,
      candidate.saturated ? el("div", { class: "small quiet", text: "saturated" }) : null),
    el("td", { "data-label": "Reuse" }, reuse(candidate, worker)),
    el("td", { "data-label": "Cost in tokens" },
      el("div", { class: "bar", role: "img", "aria-label": `cost ${count(candidate.cost)}: ${terms}` },
        added(candidate).map(([name, part]) =>
          el("i", { class: name, vars: { "--part": `${(100 * part) / most}%` }, title: `${name}: ${count(part)}` }))),
      el("div", { class: "small", text: `${count(candidate.cost)} = ${terms}` })));
}

const table = (caption, rows) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
  el("table", { class: "cards costs" }, el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, ["Worker", "Reuse", "Cost in tokens"].map((name) => el("th", { scope: "col", text: name })))),
    el("tbody", {}, rows)));

function costRange(candidates) {
  const [low, high] = [candidates[0].cost, candidates.at(-1).cost].map(count);
  return low === high ? `at ${low} tokens` : `at ${low} to ${high} tokens`;
}

/**
 * candidates: the candidates of /select with explain, in any order.
 * chosen: the route name of the chosen one.
 * workers: the answer of /workers, from which the tiers are known.
 * compared: how many candidates were compared, including those that were not kept.
 */
export function costs(candidates, chosen, workers, compared = candidates.length) {
  const sorted = [...candidates].sort((a, b) => (route(b) === chosen) - (route(a) === chosen) || a.cost - b.cost);
  const most = Math.max(1, ...sorted.map((candidate) => added(candidate).reduce((sum, [, part]) => sum + part, 0)));
  const known = new Map(workers.map((worker) => [route(worker), worker]));
  const rows = (list) => list.map((candidate) => row(candidate, chosen, most, known.get(route(candidate))));
  // A single further worker is shown as well, because folding it would save no space.
  const first = sorted.length <= SHOWN + 2 ? sorted : sorted.slice(0, SHOWN + 1);
  const rest = sorted.slice(first.length);
  const left = compared - candidates.length;
  return [
    legend(candidates), table("Workers compared, the chosen one first; the lowest cost wins", rows(first)),
    rest.length ? el("details", { "data-key": "others" },
      el("summary", { text: `${count(rest.length)} others ${costRange(rest)}` }), table("The other workers", rows(rest))) : null,
    left > 0 ? el("p", { class: "quiet small", text: `${count(left)} more with higher costs were compared, and are not kept.` }) : null,
  ];
}
