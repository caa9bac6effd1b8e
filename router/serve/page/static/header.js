// SPDX-License-Identifier: Apache-2.0
// The header: the views, the model that all of them show, the state of the router, and links to other pages.

import { key } from "./api.js";
import { changes, el, pill, show } from "./dom.js";
import { counted } from "./words.js";
import { modelsOf, readiness } from "./workers.js";

const at = (id) => document.getElementById(id);

/** Returns the findings that require action, which are all but notes. */
const urgent = (findings) => findings.filter((finding) => finding.severity !== "note");

/** Returns [text, tone] for the router's state. */
function verdict(state) {
  const { health, findings } = state;
  const { all, takers } = readiness(state);
  if (!takers) return ["no worker", "bad"];
  if (health.status !== "ok") {
    const problems = Array.isArray(findings) ? urgent(findings).length : 0;
    return [`degraded: ${Math.max(problems, health.reasons.length)}`, "warn"];
  }
  return [`ready, ${takers} of ${counted(all, "worker")}`, takers < all ? "warn" : "good"];
}

function status(state) {
  const parts = [];
  if (state.health) {
    const [text, tone] = verdict(state);
    parts.push(el("a", { class: `pill ${tone}`, id: "verdict", href: "#doctor", text }));
  }
  if (state.health && !state.log.connected) parts.push(pill("not connected", "warn"));
  return parts;
}

function models(state) {
  const names = modelsOf(state);
  // A chosen model that no longer exists is still offered, so that the choice can be seen and undone.
  if (state.model && !names.includes(state.model)) names.push(state.model);
  return names.length < 2 ? [] : [el("option", { value: "", text: "All models" }), ...names.map((name) => el("option", { value: name, text: name }))];
}

function links({ version, links: known }) {
  const { grafana_url, documentation_url } = known;
  const outside = [["Documentation", documentation_url], ["Grafana", grafana_url]].filter(([, address]) => address);
  return [
    version ? el("li", { class: "quiet", text: `kvrouter ${version}` }) : null,
    el("li", {}, el("a", { href: "/docs", text: "API" })),
    outside.map(([text, href]) => el("li", {}, el("a", { href, rel: "noreferrer", text }))),
    el("li", {}, el("button", { class: "plain", type: "button", id: "show-shortcuts", text: "Keyboard shortcuts" })),
    key() ? el("li", {}, el("button", { class: "plain", type: "button", id: "forget", text: "Forget the key" })) : null,
  ];
}

const isChanged = changes();

/** Shows `state` in the header. */
export function drawHeader(state) {
  if (!isChanged(state.workers, state.health, state.log.connected, state.version, state.findings, state.model, key())) return;
  show(at("status"), ...status(state));
  show(at("links"), ...links(state));
  const options = models(state);
  show(at("model"), ...options);
  at("model").hidden = !options.length;
  if (options.length && at("model").value !== state.model) at("model").value = state.model;
  const badge = at("views").querySelector("[href='#doctor']");
  if (badge && Array.isArray(state.findings)) {
    const number = urgent(state.findings).length;
    show(badge, "Doctor", number ? el("span", { class: "badge", "aria-label": `, ${counted(number, "finding")}`, role: "img", text: number }) : null);
  }
}
