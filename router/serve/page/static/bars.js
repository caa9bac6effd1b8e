// SPDX-License-Identifier: Apache-2.0
// What each worker's cost is made of, as bars beside the numbers.

import { el } from "./dom.js";
import { count, route, tiers } from "./words.js";

const PARTS = {
  prefill: "to compute of this prompt", queued: "others' prefill before it", decode: "answers generated there",
  delay: "later prompts that wait", room: "blocks that are pushed out of its cache",
  copy: "less: a copy of a beginning that many prompts share",
  junction: "less: full attention holds more there, to be resumed from next time", session: "less: the session is there",
};
// These make a worker cheaper.
const LESS = new Set(["copy", "junction", "session"]);

export const legend = () => el("ul", { class: "legend", "aria-label": "Terms of the cost, in tokens" },
  Object.entries(PARTS).map(([name, text]) => el("li", {}, el("i", { class: name }), `${name}: ${text}`)));

const added = (one) => Object.entries(one.parts).filter(([name, part]) => part > 0 && !LESS.has(name));

/** candidates: as /select gives them with explain, in any order; chosen: route name. */
export function costs(candidates, chosen) {
  const sorted = [...candidates].sort((a, b) => a.cost - b.cost);
  const most = Math.max(1, ...sorted.map((one) => added(one).reduce((sum, [, part]) => sum + part, 0)));
  const rows = sorted.map((one) => {
    const parts = Object.entries(one.parts).filter(([, part]) => part !== 0);
    const said = parts.map(([name, part]) => `${LESS.has(name) ? "less " : ""}${name} ${count(part)}`).join(", ") || "nothing to do";
    return el("tr", { class: route(one) === chosen ? "chosen" : null, "data-key": route(one) },
      el("th", { scope: "row" }, el("strong", { text: route(one) }),
        route(one) === chosen ? el("div", { class: "small", text: "chosen" }) : null),
      el("td", { "data-label": "Cost in tokens" },
        el("div", { class: "bar", role: "img", "aria-label": `cost ${count(one.cost)}: ${said}` },
          added(one).map(([name, part]) =>
            el("i", { class: name, vars: { "--part": `${(100 * part) / most}%` }, title: `${name}: ${count(part)}` }))),
        el("div", { class: "small", text: `${count(one.cost)} = ${said}` })),
      el("td", { "data-label": "Reuse" }, el("div", { class: "small" },
        tiers(one.overlap, ", "),
        one.limited_by ? el("div", { class: "quiet", text: `limited by g${one.limited_by.group_idx ?? "-"} ${one.limited_by.kind.replaceAll("_", " ")}: ${one.limited_by.why}` }) : null,
        one.reason ? el("div", { class: "quiet", text: one.reason }) : null)));
  });
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Cost by worker" },
    el("table", { class: "cards" }, el("caption", { text: "Workers compared, the lowest cost first; tokens" }),
      el("thead", {}, el("tr", {}, ["Worker", "Cost in tokens", "Reuse"].map((name) => el("th", { scope: "col", text: name })))),
      el("tbody", {}, rows)));
}
