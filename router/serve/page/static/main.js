// SPDX-License-Identifier: Apache-2.0
// What is known of the fleet, how it is kept up to date, and which view shows it.

import { ApiError, events, get, getText, keepKey, key, samples } from "./api.js";
import { decisions } from "./decisions.js";
import { el, pill, show } from "./dom.js";
import { EventLog, eventsView } from "./events.js";
import { fleet } from "./fleet.js";
import { prompt } from "./prompt.js";
import { REUSE_METRICS, ReuseHistory, reuse } from "./reuse.js";
import { store } from "./store.js";

const VIEWS = [fleet, reuse, decisions, prompt, eventsView, store];
const POLL_MS = 2000;
// An answer of a large fleet takes long to make: never more than a tenth of the time is spent on it.
const REST = 9;
const RETRY_MS = 2000;
const MAX_DECISIONS = 200;

const state = {
  workers: [], loads: [], health: null, version: "", metrics: null, reuse: new ReuseHistory(), log: new EventLog(),
  decisions: [], explained: null, store: null, findings: null,
};
let view = null;
let running = null;
let lastId = null;
let drawn = 0;

const at = (id) => document.getElementById(id);

/** What views may do besides showing `state`. */
const app = {
  state,
  changed: () => { drawn ||= requestAnimationFrame(draw); },
  failed: (error) => say(error),
  get signal() { return running?.signal; },
};

function draw() {
  drawn = 0;
  show(at("status"), ...status());
  view?.update(app);
}

function status() {
  const { health, version, log } = state;
  const parts = [];
  if (health) parts.push(pill(health.status, health.status === "ok" ? "good" : "bad"));
  parts.push(pill(log.connected ? "live" : "not connected", log.connected ? "good" : "warn"));
  if (version) parts.push(el("span", { text: `version ${version}` }));
  if (key()) parts.push(el("button", { class: "second", type: "button", id: "forget", text: "Forget the key" }));
  return parts;
}

function say(error) {
  if (error?.name === "AbortError") return;
  if (error instanceof ApiError && error.status === 401) {
    // Of all that was under way the first answer says it.
    if (!running) return;
    stop();
    login(key() ? error.message : "");
    return;
  }
  show(at("problem"), error ? el("p", { class: "notice", text: String(error.message ?? error) }) : null);
}

function login(problem) {
  keepKey("");
  for (const node of at("views").querySelectorAll("a")) node.removeAttribute("aria-current");
  view?.unmount?.();
  view = null;
  show(at("problem"), problem ? el("p", { class: "notice", text: problem }) : null);
  const form = el("form", { id: "login", class: "panel", "data-key": "login", on: { submit: (event) => {
    event.preventDefault();
    keepKey(event.target.elements.key.value.trim());
    show(at("problem"));
    open();
  } } },
  el("h2", { text: "This router wants its API key" }),
  el("p", { class: "quiet", text: "It is kept in this tab until you close it, and sent to this router alone." }),
  el("label", {}, el("span", { text: "API key" }),
    el("input", { name: "key", type: "password", autocomplete: "off", required: true })),
  el("button", { type: "submit", text: "Open" }));
  at("view").replaceChildren(form);
}

async function every(pause_ms, work, signal) {
  while (!signal.aborted) {
    const begun = performance.now();
    try {
      await work(signal);
      app.changed();
    } catch (error) {
      say(error);
      state.unwell = true;
    }
    const took = performance.now() - begun;
    await new Promise((done) => setTimeout(done, Math.max(pause_ms, REST * took)));
  }
}

async function lookAtFleet(signal) {
  const [workers, loads, health] = await Promise.all([get("/workers", signal), get("/loads", signal), get("/health", signal)]);
  Object.assign(state, { workers: workers.workers, loads, health });
  if (state.unwell) {
    state.unwell = false;
    say(null);
  }
}

async function lookAtMetrics(signal) {
  state.metrics = samples(await getText("/metrics", signal), REUSE_METRICS);
  state.reuse.add(Date.now() / 1000, state.metrics);
}

async function lookAtStore(signal) {
  if (view === store) state.store = await get("/store", signal);
}

async function follow(signal) {
  while (!signal.aborted) {
    try {
      state.decisions = (await get("/decisions?limit=100", signal)).decisions;
      const heard = (event) => {
        lastId = event.id ?? lastId;
        state.log.connected = true;
        state.log.add(event);
        if (event.type === "decision") {
          const known = new Set([event.data.selection_id]);
          state.decisions = [event.data, ...state.decisions.filter((one) => !known.has(one.selection_id))].slice(0, MAX_DECISIONS);
        }
        app.changed();
      };
      const stream = events("/events", lastId, heard, signal);
      state.log.connected = true;
      app.changed();
      await stream;
    } catch (error) {
      say(error);
      state.unwell = true;
    }
    state.log.connected = false;
    app.changed();
    if (!signal.aborted) await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

function start() {
  if (running) return;
  running = new AbortController();
  const { signal } = running;
  every(POLL_MS, lookAtFleet, signal);
  every(POLL_MS, lookAtMetrics, signal);
  every(POLL_MS, lookAtStore, signal);
  follow(signal);
  // Rates fall to zero also when nothing happens.
  every(1000, async () => state.log.tick(Date.now() / 1000), signal);
  get("/version", signal).then((reply) => { state.version = reply.version; }, say);
}

function stop() {
  running?.abort();
  running = null;
  state.log.connected = false;
}

function open() {
  const wanted = location.hash.slice(1).split("/")[0];
  const next = VIEWS.find((one) => one.id === wanted) ?? VIEWS[0];
  for (const link of at("views").querySelectorAll("a")) {
    if (link.hash === `#${next.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${next.title} – kvrouter`;
  if (view !== next) {
    view?.unmount?.();
    view = next;
    at("view").replaceChildren();
    view.mount(at("view"), app);
  } else {
    view.moved?.(app);
  }
  start();
  if (view === store) lookAtStore(running.signal).then(app.changed, say);
  app.changed();
}

for (const one of VIEWS) {
  at("views").append(el("li", {}, el("a", { href: `#${one.id}`, text: one.title })));
}
at("status").addEventListener("click", (event) => {
  if (event.target.id === "forget") {
    stop();
    login("");
  }
});
addEventListener("hashchange", () => { if (running) open(); });
// A page that nobody looks at asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (view) start();
});
if (document.querySelector("meta[name=key]") && !key()) login("");
else open();
