// SPDX-License-Identifier: Apache-2.0
// What is known of the fleet, how it is kept up to date, and which view shows it.

import { ApiError, events, get, getText, keepKey, key, samples } from "./api.js";
import { decisions } from "./decisions.js";
import { DOCTOR_MS, doctor, examine } from "./doctor.js";
import { el, show } from "./dom.js";
import { EventLog, eventsView } from "./events.js";
import { fleet } from "./fleet.js";
import { drawHeader } from "./header.js";
import { HISTORY_METRICS, History } from "./history.js";
import { listenToKeys, showShortcuts } from "./keys.js";
import { overview } from "./overview.js";
import { prompt } from "./prompt.js";
import { REUSE_METRICS, reuse } from "./reuse.js";
import { store } from "./store.js";

const VIEWS = [overview, fleet, reuse, decisions, prompt, eventsView, doctor, store];
const MODEL = "kvrouter-model";
const METRICS = [...new Set([...REUSE_METRICS, ...HISTORY_METRICS])];
const POLL_MS = 2000;
// The shortest step of the router's history.
const HISTORY_MS = 5000;
// Savings are sums of whole days, so they are read rarely.
const SAVINGS_MS = 60_000;
// An answer of a large fleet takes long to make: never more than a tenth of the time is spent on it.
const REST = 9;
const RETRY_MS = 2000;

const state = {
  workers: [], loads: [], health: null, version: "", links: {}, metrics: null, history: new History(), log: new EventLog(),
  store: null, savings: null,
  // The findings of the doctor's last report, and that report.
  findings: null, diagnosis: null,
  // The model that views show; empty: all of them.
  model: sessionStorage.getItem(MODEL) ?? "",
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
  /** Reads the history again, after another range was chosen. */
  rangeChanged: () => lookAtHistory(running.signal).then(app.changed, say),
  get signal() { return running?.signal; },
};

function draw() {
  drawn = 0;
  drawHeader(state);
  view?.update(app);
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

/** The metrics of a large fleet are megabytes, so they are read only where they are shown. */
async function lookAtMetrics(signal) {
  if (view !== reuse && state.history.isKept) return;
  state.metrics = samples(await getText("/metrics", signal), METRICS);
  state.history.observe(Date.now() / 1000, state.metrics, state.model);
}

const lookAtHistory = (signal) => state.history.look(signal, state.model);

async function lookAtSavings(signal) {
  if (view !== overview) return;
  const { model } = state;
  let savings;
  try {
    savings = await get(`/savings?days=7${model ? `&model=${encodeURIComponent(model)}` : ""}`, signal);
  } catch (error) {
    if (error.status !== 404) throw error;
    savings = { days: [], isMissing: !model };
  }
  // Another model may have been chosen meanwhile.
  if (state.model === model) state.savings = savings;
}

async function lookAtStore(signal) {
  if (view === store) state.store = await get("/store", signal);
}

async function follow(signal) {
  while (!signal.aborted) {
    try {
      const heard = (event) => {
        lastId = event.id ?? lastId;
        state.log.connected = true;
        state.log.add(event);
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
  every(HISTORY_MS, lookAtHistory, signal);
  every(SAVINGS_MS, lookAtSavings, signal);
  every(POLL_MS, lookAtStore, signal);
  every(DOCTOR_MS, (stopped) => examine(app, stopped), signal);
  follow(signal);
  // Rates fall to zero also when nothing happens.
  every(1000, async () => state.log.tick(Date.now() / 1000), signal);
  get("/version", signal).then(({ version, ...links }) => { Object.assign(state, { version, links }); }, say);
}

function stop() {
  running?.abort();
  running = null;
  state.log.connected = false;
}

function open() {
  const wanted = location.hash.slice(1).split(/[/?]/)[0];
  const next = VIEWS.find((view) => view.id === wanted) ?? VIEWS[0];
  for (const link of at("views").querySelectorAll("a")) {
    if (link.hash === `#${next.id}`) {
      link.setAttribute("aria-current", "page");
      if (view !== next) link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else {
      link.removeAttribute("aria-current");
    }
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
  if (running) look();
  else start();
  app.changed();
}

/** Reads at once the data that only this view needs. */
function look() {
  const { signal } = running;
  if (view === store) lookAtStore(signal).then(app.changed, say);
  if (view === reuse) lookAtMetrics(signal).then(app.changed, say);
  if (view === overview) lookAtSavings(signal).then(app.changed, say);
}

for (const view of VIEWS) {
  at("views").append(el("li", {}, el("a", { href: `#${view.id}`, text: view.title })));
}
at("menu").addEventListener("click", (event) => {
  if (event.target.id === "forget") {
    stop();
    login("");
  }
  if (event.target.id === "show-shortcuts") showShortcuts(VIEWS);
  if (event.target.closest("a, button")) at("menu").open = false;
});
at("model").addEventListener("change", (event) => {
  state.model = event.target.value;
  sessionStorage.setItem(MODEL, state.model);
  state.history.forget();
  state.savings = null;
  if (!running) return;
  app.rangeChanged();
  look();
  app.changed();
});
listenToKeys({ views: VIEWS, root: at("view"), close: () => {
  if (at("menu").open) at("menu").open = false;
  else view?.close?.(app);
} });
addEventListener("hashchange", () => { if (running) open(); });
// A page that nobody looks at asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (view) start();
});
if (document.querySelector("meta[name=key]") && !key()) login("");
else open();
