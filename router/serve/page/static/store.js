// SPDX-License-Identifier: Apache-2.0
// Redis, the routers on it, who follows whom, and what the doctor finds.

import { get } from "./api.js";
import { el, pill, show, table, tiles } from "./dom.js";
import { bytes, count, percent, route } from "./words.js";

const SEVERITIES = { error: "bad", warning: "warn", note: "" };
let looking = false;

async function look(app) {
  looking = true;
  app.changed();
  try {
    app.state.findings = await get("/diagnosis", app.signal);
  } catch (error) {
    app.failed(error);
  }
  looking = false;
  app.changed();
}

function findings(report) {
  if (!report) return el("p", { class: "quiet", text: looking ? "Looking at every endpoint…" : "Not run yet." });
  if (!report.findings.length) return el("p", { text: `Nothing found by ${count(report.checks)} checks.` });
  return el("ol", { class: "findings" }, report.findings.map((one) => el("li", { "data-key": `${one.code}/${one.subject}` },
    pill(one.severity, SEVERITIES[one.severity] ?? ""), " ", el("code", { text: one.code }), " ", el("strong", { text: one.subject }),
    el("div", { text: one.problem }), el("div", { class: "small quiet", text: one.evidence }),
    el("div", { class: "code", text: one.fix.replaceAll("ROUTER", location.origin) }))));
}

function follows(list) {
  const shown = list.slice(0, 200).map((one) => `${route(one)} (${one.model})${one.is_late ? ", late" : ""}`);
  return `${shown.join("; ")}${list.length > 200 ? `; and ${count(list.length - 200)} more` : ""}` || "none";
}

function update({ state }) {
  const { store, findings: report } = state;
  if (store) {
    show(document.getElementById("store-now"),
      store.problem ? el("p", { class: "notice", text: store.problem }) : null,
      tiles([["Store", store.is_private ? "its own Valkey" : "shared Redis"], ["Servers", count(store.servers.length)],
        ["Routers", count(store.routers.length)], ["Workers nobody follows", count(store.unfollowed.length)]]),
      el("section", { class: "panel" }, table({
        caption: "Servers of the store", cards: true,
        columns: [{ name: "Address" }, { name: "Memory" }, { name: "Eviction" }, { name: "Persistence" }, { name: "Failing" }],
        rows: store.servers.map((one) => [one.address || "it does not say",
          one.used_bytes === null ? "not known" : `${bytes(one.used_bytes)} of ${bytes(one.limit_bytes)} (${percent(one.used_bytes, one.limit_bytes)})`,
          one.policy || "not known", `append-only file ${one.appends === null ? "not known" : one.appends ? "on" : "off"}, snapshots ${one.save === null ? "not known" : one.save || "off"}`,
          one.failing || "nothing"]),
        empty: "No server answers.",
      })),
      el("section", { class: "panel" }, table({
        caption: "Routers, and the workers whose leases they hold", cards: true,
        columns: [{ name: "Router" }, { name: "Version" }, { name: "Leases", number: true }, { name: "Follows" }, { name: "Will not follow", number: true }],
        keys: store.routers.map((one) => one.token),
        rows: store.routers.map((one) => [el("span", {}, el("code", { text: one.token }), one.is_this ? " (this one)" : ""), one.version,
          count(one.follows.length), follows(one.follows), count(one.refuses)]),
        empty: "No router has said that it lives.",
      }), store.unfollowed.length ? el("p", { class: "notice warning", text: `Nobody follows: ${follows(store.unfollowed)}` }) : null));
  }
  show(document.getElementById("store-findings"), findings(looking ? null : report));
}

export const store = {
  id: "store",
  title: "Store",
  mount(root, app) {
    root.append(el("h2", { text: "Store" }), el("div", { id: "store-now" }),
      el("section", { class: "panel" }, el("h3", { text: "Doctor" }),
        el("p", {}, el("button", { type: "button", text: "Look for what is wrong", on: { click: () => look(app) } })),
        el("div", { id: "store-findings", "aria-live": "polite" })));
  },
  update,
};
