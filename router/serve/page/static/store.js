// SPDX-License-Identifier: Apache-2.0
// The store (Redis), the routers that use it, and the workers that each router follows.

import { el, show, table, tiles } from "./dom.js";
import { bytes, count, percent, route } from "./words.js";

// How many names a cell shows before they are folded, and how many are listed in all.
const SHOWN = 6;
const LISTED = 200;

/** Names of workers, folded where they are many. */
function names(list) {
  if (!list.length) return "none";
  const texts = list.slice(0, LISTED).map((worker) => `${route(worker)}${worker.is_late ? " (late)" : ""}`);
  const left = list.length - texts.length;
  const text = `${texts.join(", ")}${left ? `, and ${count(left)} more` : ""}`;
  if (list.length <= SHOWN) return text;
  return el("details", {}, el("summary", { text: `${count(list.length)} workers` }), text);
}

function update({ state: { store } }) {
  if (store) {
    show(document.getElementById("store-now"),
      store.problem ? el("p", { class: "notice", text: store.problem }) : null,
      tiles([["Store", store.is_private ? "its own Valkey" : "shared Redis"], ["Servers", count(store.servers.length)],
        ["Routers", count(store.routers.length)], ["Unassigned workers", count(store.unfollowed.length)]]),
      el("section", { class: "panel" }, table({
        caption: "Servers of the store", cards: true,
        columns: [{ name: "Address" }, { name: "Memory" }, { name: "Eviction" }, { name: "Persistence" }, { name: "Failing" }],
        rows: store.servers.map((server) => [el("span", { class: "path", text: server.address || "it does not say" }),
          server.used_bytes === null ? "not known" : `${bytes(server.used_bytes)} of ${bytes(server.limit_bytes)} (${percent(server.used_bytes, server.limit_bytes)})`,
          server.policy || "not known", `append-only file ${server.appends === null ? "not known" : server.appends ? "on" : "off"}, snapshots ${server.save === null ? "not known" : server.save || "off"}`,
          server.failing || "nothing"]),
        empty: "No server answers.",
      })),
      el("section", { class: "panel" }, table({
        caption: "Routers, and the workers whose leases they hold", cards: true,
        columns: [{ name: "Router" }, { name: "Version" }, { name: "Leases", number: true }, { name: "Follows" }, { name: "Refuses", number: true }],
        keys: store.routers.map((router) => router.token),
        rows: store.routers.map((router) => [el("span", {}, el("code", { text: router.token }), router.is_this ? " (this one)" : ""), router.version,
          count(router.follows.length), names(router.follows), count(router.refuses)]),
        empty: "No router has said that it lives.",
      }), store.unfollowed.length ? el("div", { class: "notice warning" }, "No router follows these workers, so their blocks earn no credit: ", names(store.unfollowed)) : null));
  }
}

export const store = {
  id: "store",
  title: "Store",
  mount(root) {
    root.append(el("h2", { text: "Store" }), el("div", { id: "store-now" }));
  },
  update,
};
